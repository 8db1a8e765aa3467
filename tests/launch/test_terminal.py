"""What both commands print at a terminal of 80 columns, and what the doctor prints elsewhere."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import closing, suppress

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from reducer.commands.terminal import FittedTable, wrapped
from reducer.errors import MismatchError
from reducer.monitoring.http_port import HttpPort
from tests.commands import run_command
from tests.conftest import joined, reducer_here
from tests.launch.conftest import ROOT, bare_environment
from tests.waits import eventually

COLUMNS = 80
# All commands in one interpreter, as most of their time goes into starting.
RUN = """
import shlex, sys
from importlib import import_module
for line in sys.argv[1:]:
    command, *arguments = shlex.split(line)
    try:
        import_module(command.replace("-", "_") + ".cli").app(arguments)
    except SystemExit as done:
        print("\\nexit code", done.code, flush=True)
"""
PLAN = "reducer plan --workers 8 --worker-gbps 100 --reducer-gbps 32 --backward 200ms"
ILL = "no-such-host.invalid:5555,127.0.0.1:1"
JOB = "a-job-with-a-name-that-is-longer-than-most-of-them-are"


def at_terminal(*lines, **settings):
    """Run commands at a terminal of 80 columns, and return what they print, escapes and all."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = bare_environment(TERM="xterm", COLUMNS=str(COLUMNS), **settings)
    environment = {"NO_COLOR": "", **environment}
    said = b""
    with (
        subprocess.Popen(
            [sys.executable, "-c", RUN, *lines],
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=ROOT,
            env=environment,
        ) as process,
        os.fdopen(ours, "rb", 0) as terminal,
    ):
        os.close(its)
        with suppress(OSError):  # at the end
            while part := terminal.read(1 << 16):
                said += part
        assert process.wait(60) == 0
    return said.decode()


def plain(said):
    """Return what is left of output without what it tells the terminal."""
    said = re.sub(r"\x1b\[[0-9]*[ABFGHJ]", "\n", said)  # a picture that is drawn over the last one
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).replace("\r", "")


@pytest.fixture
def job(tmp_path, monkeypatch, no_settings):
    """A job that has left a timeline and dumps, with a call that ranks made differently."""
    monkeypatch.setenv("REDUCTION_TIMELINE", str(tmp_path))
    monkeypatch.setenv("REDUCTION_DUMP", str(tmp_path / "dumps"))
    with (
        reducer_here() as server,
        closing(HttpPort("127.0.0.1:0")) as port,
        port.serving(server.observer),
        joined(2, servers=server.address, job=JOB) as clients,
    ):
        for sizes in ((1000, 1000), (3, 5)):
            both = zip(clients, sizes, strict=True)
            works = [client.all_reduce(np.ones(size)) for client, size in both]
            for work in works:
                with suppress(MismatchError):
                    work.wait(20)
        # Who waits hears of the error before the files are written.
        eventually(lambda: len(list(tmp_path.rglob("calls-*.json"))) == 2)
        yield port.address


def test_all_lines_fit(job, tmp_path):
    said = at_terminal(
        f"reducer status {job},127.0.0.1:1",
        f"reducer top {job} --count 2 --interval 0.2",
        f"{PLAN} --worker-cost 30 --reducer-cost 0.6",
        "worker-client doctor",
        f"worker-client doctor --dump {tmp_path / 'dumps'}",
        "worker-client launch --dry-run --nproc-per-node 2 -- examples/quickstart.py "
        + "-a b " * 9,
        f"worker-client timeline merge {tmp_path} --output {tmp_path / 'merged'}",
        REDUCTION_SERVERS=ILL,
    )
    text = plain(said)
    assert re.findall(r"exit code (\d)", text) == list("1001100")
    for word in (
        *(
            "contributions",
            "serving",
            "hours gained per unit",
            "what to do:",
            "it shows of none which one is wrong",
        ),
        *("torch.distributed.run", "on this node", "ui.perfetto.dev"),
    ):
        assert word in " ".join(text.split()), word
    assert JOB in text
    long = [line for line in text.splitlines() if cell_len(line) > COLUMNS]
    assert [line for line in long if len(line.split()) > 1] == []


def test_the_doctor_says_the_same_words_in_colours_and_without():
    shown = at_terminal("worker-client doctor", REDUCTION_SERVERS=ILL)
    assert "\x1b[1;31mname does not resolve:" in shown
    assert "│" in shown
    command = [sys.executable, "-c", RUN, "worker-client doctor"]
    text = run_command(*command, env=bare_environment(REDUCTION_SERVERS=ILL), timeout=60).stdout
    assert max(map(len, text.splitlines())) > COLUMNS  # each thing is one line, for grep
    assert not re.search(r"[\x1b│]", text)
    words = re.sub(r"[╭╮╰╯─┬┴│├┤┼]", " ", plain(shown)).split()
    assert sorted(words) == sorted(text.split())


@pytest.mark.parametrize("width", [200, 80, 40, 30])
def test_a_table_that_does_not_fit_is_shown_in_parts(width):
    names = ["where it is", "kept", "sent by all ranks", "n", "many more words than digits"]
    rows = [["host-1:5555", "1.5 GB", "12,345", str(n), "0.5%"] for n in range(3)]
    table = FittedTable("Title", names, rows, texts=1, caption="caption")
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    said = capture.get()
    assert all(cell_len(line) <= width for line in said.splitlines())
    for row in rows:
        for cell in row:
            assert re.search(rf"(^| ){re.escape(cell)}( |$)", said, flags=re.M), cell
    parts = {200: 1, 80: 1, 40: 2, 30: 3}[width]
    assert said.count("host-1:5555") == 3 * parts
    assert (said.count("Title"), said.count("caption")) == (1, 1)


def test_sentences_are_wrapped_at_words():
    assert wrapped("name  a few words and a-word-that-stays-whole", 6, 20).split("\n") == [
        "name  a few words",
        "      and",
        "      a-word-that-stays-whole",
    ]
    assert wrapped("name  a few words", 15, 12) == "name  a few\n    words"
    assert wrapped("word " * 1000, 4) == ("word " * 1000).strip()  # here is no terminal
