"""``python -m lab``: what it runs, prints and returns."""

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab, claims
from tests.commands import run_command
from tests.lab.conftest import own_keeper
from tests.waits import eventually

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-S", "-m", "lab"]


def command(*arguments, text=""):
    return run_command(*COMMAND, *arguments, cwd=ROOT, input=text)


@pytest.fixture(params=[["--mbit", "100"], ["--loopback"]], ids=["namespaces", "loopback"])
def kind(request):
    if "--mbit" in request.param:
        request.getfixturevalue("namespaces")
    return list(request.param)


def test_a_command_runs_in_every_host(kind):
    script = "echo host $LAB_INDEX of $LAB_HOSTS at $LAB_ADDRESS"
    done = command("run", "--hosts", "3", *kind, "--", "sh", "-c", script)
    lines = sorted(done.stdout.splitlines())
    assert [line.partition(" at ")[0] for line in lines] == [
        f"[{index}] host {index} of 3" for index in range(3)
    ]
    assert len({line.partition(" at ")[2] for line in lines}) == (3 if "--mbit" in kind else 1)
    assert done.returncode == 0


def test_a_command_in_one_host_has_the_callers_streams(kind):
    done = command("run", *kind, "--on", "1", "--", "sh", "-c", "cat; echo $LAB_INDEX", text="in ")
    assert done.stdout == "in 1\n"


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_status_is_the_first_failures(kind, script, status):
    done = command("run", *kind, "--", "sh", "-c", f"[ $LAB_INDEX = 0 ] || {script}")
    assert done.returncode == status


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--on", "2", "--", "true"], "--on 2: the hosts are 0 to 1"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(arguments, said):
    done = command("run", "--loopback", *arguments)
    assert done.stderr.startswith(f"lab: {said}")
    assert done.stderr.count("\n") == 1
    assert done.returncode == 1


def test_a_dead_lab_is_shown_and_cleaned(namespaces):
    with Lab(1) as lab:
        name = lab.hosts[0].name.partition("-")[0]
        own_keeper().kill()
        eventually(lambda: not claims.look(int(name.removeprefix("rlab")))[0])
        assert f"{name}  dead: remove it with `python -m lab clean`" in command("show").stdout
        assert f"{name} removed" in command("clean").stdout.splitlines()
        assert name not in command("show").stdout.split()


def test_an_interrupted_run_leaves_nothing(kind):
    with subprocess.Popen(
        [*COMMAND, "run", *kind, "--", "sh", "-c", "echo $LAB_NAME; exec sleep 1000"],
        cwd=ROOT,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stderr
        try:
            name = process.stdout.readline().split()[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert not (Path("/run/netns") / name).exists()
