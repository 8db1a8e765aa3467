"""``python -m lab``: what it runs, prints and returns."""

import sys
from pathlib import Path

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


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_one_host_has_the_callers_streams_and_the_status_is_the_first_failures(
    kind, script, status
):
    script = f"[ $LAB_INDEX = 0 ] || {{ cat; echo $LAB_INDEX; {script}; }}"
    done = command("run", *kind, "--on", "1", "--", "sh", "-c", script, text="in ")
    assert (done.stdout, done.returncode) == ("in 1\n", status)
    assert command("run", *kind, "--", "sh", "-c", script).returncode == status


def test_a_dead_lab_is_shown_and_cleaned_and_a_living_one_spared(namespaces):
    with Lab(1) as living, Lab(1) as lab:
        spared, ended = (one.hosts[0].start(["sleep", "1000"]) for one in (living, lab))
        name = lab.hosts[0].name.partition("-")[0]
        own_keeper().kill()
        eventually(lambda: not claims.look(int(name.removeprefix("rlab")))[0])
        assert f"{name}  dead: remove it with `python -m lab clean`" in command("show").stdout
        assert ended.poll() is None
        assert f"{name} removed" in command("clean").stdout.splitlines()
        assert ended.wait(10) < 0
        assert name not in command("show").stdout.split()
        assert living.hosts[0].name.partition("-")[0] in command("show").stdout.split()
        assert spared.poll() is None
