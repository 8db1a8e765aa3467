"""The quick start of the README and the pool of docs/frameworks.md run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import free_ports, run_command
from tests.ranks import environments, ranks
from tests.waits import eventually

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START_S = 60.0


def block(language: str) -> str:
    """Return the first code block of a language in the quick start."""
    section = README.partition("\n## Quick start\n")[2].partition("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found, f"the quick start has no {language} block"
    return found[1]


def test_the_readme_fits_a_few_screens() -> None:
    assert len(README.splitlines()) <= 160
    assert max(map(len, README.splitlines())) <= 100


def test_the_quick_start_is_the_example() -> None:
    assert block("python") == (ROOT / "examples" / "quickstart.py").read_text()


TORCHRUN = """#!/bin/sh
echo "$REDUCTION_SERVERS" "$@" > '{folder}/asked'
cat '{folder}/answered'
"""


def fork_for(shell: subprocess.Popen[str], folder: Path) -> None:
    """Answer TORCHRUN as the ranks would, which are forked."""
    asked, answered = folder / "asked", folder / "answered"
    for embedded in (False, True):  # as the quick start does
        servers, *options = asked.read_text()[:-1].split(" ")
        assert shell.poll() is None
        assert (servers == "") == embedded
        assert options == ["--nproc-per-node", "3", "examples/quickstart.py"]
        for server in filter(None, servers.split(",")):
            wait_for(server)
        with ranks(environments(3, servers.split(",") * bool(servers)), ROOT / options[2]) as job:
            answered.write_text("".join(job.outputs()))


def wait_for(server: str) -> None:
    """Wait for a reducer that has just been started, as torchrun does by starting slowly."""
    host, _, port = server.rpartition(":")

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    eventually(listens, START_S)


@pytest.mark.parametrize("launcher", ["forks", "torchrun"])
def test_the_quick_start_runs_as_shown(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    # Only the port numbers are changed, because another program may have those of the README.
    script, (first, second, master) = block("sh"), map(str, free_ports(3))
    assert script.count("5555") == script.count("5556") == 2
    script = script.replace("5555", first).replace("5556", second)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    if launcher == "forks":
        for fifo in ("asked", "answered"):
            os.mkfifo(tmp_path / fifo)
        (tmp_path / "torchrun").write_text(TORCHRUN.format(folder=tmp_path))
        (tmp_path / "torchrun").chmod(0o755)
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", f"{script}\nwait"],
        cwd=ROOT,
        env={
            **inherited,
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PET_MASTER_PORT": master,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            if launcher == "forks":
                fork_for(shell, tmp_path)
            said, _ = shell.communicate(timeout=200)
            assert shell.returncode == 0, said
            with pytest.raises(ProcessLookupError):
                os.killpg(shell.pid, 0)  # the reducers have stopped, too
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    ends = re.findall(r"rank (\d): loss (\S+), weights (\w{16}), (\d) reducers", said)
    assert sorted((int(reducers), int(rank)) for rank, _, _, reducers in ends) == [
        (reducers, rank) for reducers in (2, 3) for rank in (0, 1, 2)
    ]
    assert len({weights for _, _, weights, _ in ends}) == 1
    assert all(float(loss) < 1e-3 for _, loss, _, _ in ends)


def test_the_pool_for_a_notebook_runs_as_shown_and_warns_of_nothing() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    found = re.search(r"^from reducer import local_pool\n.*?(?=^```$)", page, re.M | re.DOTALL)
    assert found, "docs/frameworks.md has no local_pool"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    command = (sys.executable, "-c", f"import worker_client\n{found[0]}")
    ended = run_command(*command, env=environment, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "")
    begins, ends = ended.stderr.splitlines()
    assert begins.startswith("reduction: rank 0 of 1, job ")
    assert ends.startswith("reduction: rank 0 of 1, job ")


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
