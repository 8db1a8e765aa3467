"""Pages as their readers use them: what is in their code blocks, and a shell that runs it.

    stand_in_for_torchrun(tmp_path)
    with shell(on_free_ports("".join(blocks(page, "sh"))), path=tmp_path) as running:
        asked = answer_torchrun(tmp_path)
        said = finish(running)

Torchrun's own ranks import torch anew, each for seconds; those of the stand-in are forked.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.commands import free_ports
from tests.ranks import environments, ranks
from tests.waits import eventually

ROOT = Path(__file__).parents[1]
START_S = 60.0
END_S = 200.0
PORTS = re.compile(r"(?<=:|\s)(?:5555|5556|9090|9091)\b")  # of the reducers that pages start
FINGERPRINT = re.compile(r"rank (\d): loss (\S+), weights (\w{16}), (\d+) (?:reducers|bytes)")

# Hands over settings and arguments, and prints what it is answered.
TORCHRUN = """#!/bin/sh
{{ env | grep ^REDUCTION_; echo "$@"; }} > '{folder}/asked'
cat '{folder}/answered'
"""


class Asked(NamedTuple):
    """What torchrun was asked for: the ``REDUCTION_`` settings around it, and its arguments."""

    settings: dict[str, str]
    arguments: list[str]


def blocks(page, language, section=""):
    """Return the code blocks of a language on a page, or in the section with this title."""
    text = (ROOT / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def on_free_ports(script):
    """Return a script with ports that nobody has in place of the page's, which somebody may."""
    named = sorted(set(PORTS.findall(script)))
    ports = dict(zip(named, free_ports(len(named)), strict=True))
    return PORTS.sub(lambda found: str(ports[found[0]]), script)


@contextmanager
def shell(script, *, path=None, **environment):
    """A shell that runs a script in the checkout, with the commands of this installation.

    The first command that fails ends it. Those of the folder `path` go before these.
    """
    folders = [*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    given = {"PATH": os.pathsep.join(folders), "PET_MASTER_PORT": str(*free_ports(1))}
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", f"{script}\nwait"],
        cwd=ROOT,
        env={**inherited, **given, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def finish(running):
    """Wait for a shell's end, and return what it said; it has succeeded and left no process."""
    said, _ = running.communicate(timeout=END_S)
    assert running.returncode == 0, said
    try:
        os.killpg(running.pid, 0)
    except ProcessLookupError:
        return said
    raise AssertionError(f"a process is left of: {said}")


def stand_in_for_torchrun(folder):
    """Put a `torchrun` into a folder whose calls `answer_torchrun` answers."""
    for fifo in ("asked", "answered"):
        os.mkfifo(folder / fifo)
    (folder / "torchrun").write_text(TORCHRUN.format(folder=folder))
    (folder / "torchrun").chmod(0o755)


def answer_torchrun(folder):
    """Answer a call of the stand-in in a folder with what ranks say that are forked."""
    *settings, line = (folder / "asked").read_text().removesuffix("\n").split("\n")
    asked = Asked(dict(one.split("=", 1) for one in settings), line.split())
    assert asked.arguments[0] == "--nproc-per-node"
    number, script, *given = asked.arguments[1:]
    for server in filter(None, asked.settings.get("REDUCTION_SERVERS", "").split(",")):
        wait_for(server)
    with ranks(environments(int(number), **asked.settings), ROOT / script, *given) as job:
        (folder / "answered").write_text("".join(job.outputs()))
    return asked


def wait_for(server):
    """Wait for a reducer that has just been started, as torchrun does by starting slowly."""
    host, _, port = server.rpartition(":")

    def listens():
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    eventually(listens, START_S)
