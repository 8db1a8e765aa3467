"""However a lab ends, nothing of it stays: processes, namespaces, names, claims."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from lab import Lab, LabUnavailable, claims, keeper
from tests.commands import run_command
from tests.lab.conftest import own_keeper
from tests.waits import eventually

ROOT = Path(__file__).parent.parent.parent
SOON_S = 10.0
# A process that starts another in a session of its own, and tells its id.
FAMILY = ["sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"]
# A benchmark that makes a lab and tells what there is of it; `fork` leaves a child with its files.
OWNER = """
import json, os, sys, time
from subprocess import PIPE
from lab import Lab
with Lab.loopback(2) if "loopback" in sys.argv else Lab(2, 100) as lab:
    process = lab.hosts[1].start(json.loads(sys.argv[1]), stdout=PIPE)
    family = [process.pid, int(process.stdout.readline())]
    child = os.fork() if "fork" in sys.argv else 0
    if child or "fork" not in sys.argv:
        told = [lab.hosts[0].name, family, lab._keeper.pid, child]
        print(json.dumps(told), flush=True)
    time.sleep(1000)
"""


@dataclass
class Owner:
    """A benchmark in a process of its own, and its lab."""

    process: subprocess.Popen[str]
    name: str
    family: list[int]
    keeper: int
    child: int


@contextmanager
def owner(*options):
    with subprocess.Popen(
        [sys.executable, "-S", "-c", OWNER, json.dumps(FAMILY), *options],
        cwd=ROOT,
        stdout=PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout
            yield Owner(process, *json.loads(process.stdout.readline()))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(params=["namespaces", "loopback"])
def kind(request):
    if request.param == "namespaces":
        request.getfixturevalue("namespaces")
    return str(request.param)


def make(kind):
    return Lab.loopback(2) if kind == "loopback" else Lab(2, 100)


def alive(pids):
    """Those that run; one that has ended may wait to be reaped by whoever inherited it."""
    left = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
    return left


def traces(name):
    """What exists of the lab that a host with this name belongs to."""
    if name == "localhost":
        return []
    prefix = name.partition("-")[0]
    paths = [claims.CLAIMS / prefix.removeprefix("rlab")]
    for directory in ("/run/netns", "/etc/netns"):
        paths += Path(directory).glob(f"{prefix}-*")
    return [str(path) for path in paths if path.exists()]


def until_gone(name, pids):
    eventually(lambda: not (traces(name) or alive(pids)), SOON_S)


def start_family(host):
    """Start what starts another; return it, and the ids of both."""
    process = host.start(FAMILY, stdout=PIPE)
    assert process.stdout
    return process, [process.pid, int(process.stdout.readline())]


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_the_end_of_the_block_ends_everything(kind, failure):
    with ExitStack() as stack:
        if failure:
            stack.enter_context(pytest.raises(failure))
        with make(kind) as lab:
            name = lab.hosts[0].name
            process, family = start_family(lab.hosts[1])
            assert alive(family) == family
            assert kind == "loopback" or len(traces(name)) == 6
            if failure:
                raise failure
    assert alive(family) == []
    assert traces(name) == []
    assert process.returncode == -signal.SIGKILL
    assert process.stdout
    assert process.stdout.closed


def test_a_process_that_sheds_environment_and_session_still_ends_with_its_host(namespaces):
    with Lab(1) as lab:
        script = "env -i setsid sleep 1000 & echo $!"
        process = lab.hosts[0].start(["sh", "-c", script], stdout=PIPE)
        assert process.stdout
        pid = int(process.stdout.readline())
        assert process.wait(SOON_S) == 0
        eventually(lambda: not psutil.Process(pid).environ())
        assert alive([pid])
    assert alive([pid]) == []


@pytest.mark.parametrize(
    "name", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, "fork"]
)
def test_a_benchmark_that_is_killed_or_hears_a_signal_of_the_terminal_leaves_nothing(kind, name):
    with owner(kind, name if name == "fork" else "") as benchmark:
        assert alive(benchmark.family) == benchmark.family
        if name in {"fork", signal.SIGKILL}:
            benchmark.process.kill()
        else:
            assert os.getsid(benchmark.keeper) == benchmark.keeper
            os.kill(benchmark.keeper, name)
            os.killpg(benchmark.process.pid, name)
        until_gone(benchmark.name, [*benchmark.family, benchmark.keeper])
        assert name != "fork" or alive([benchmark.child])  # and does not keep its parent's lab


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.06, 0.1])
def test_a_benchmark_killed_while_it_builds_leaves_nothing(namespaces, after_s):
    before = dead()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "from lab import Lab; Lab(20, 100).__enter__()"],
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + SOON_S
        while not (keepers := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
        time.sleep(after_s)
        process.kill()
    until_gone("localhost", [keepers[0].pid])
    assert all(claims.look(number)[1].owner != process.pid for number in claims.known())
    assert dead() <= before


def dead():
    return {number for number in claims.known() if not claims.look(number)[0]}


def test_a_lab_whose_keeper_was_killed_is_removed_at_its_end(kind):
    with make(kind) as lab:
        name = lab.hosts[0].name
        _, family = start_family(lab.hosts[1])
        own_keeper().kill()
    assert alive(family) == []
    assert traces(name) == []


def kill(benchmark):
    """Kill a benchmark and its lab's keeper, so that nobody removes the lab."""
    os.kill(benchmark.keeper, signal.SIGKILL)
    benchmark.process.kill()
    benchmark.process.wait()


def test_cleaning_removes_dead_labs_and_spares_living_ones(namespaces):
    with Lab(1) as living, owner() as benchmark:
        survivor = living.hosts[0].start(["sleep", "1000"])
        kill(benchmark)
        number = int(benchmark.name.partition("-")[0].removeprefix("rlab"))
        eventually(lambda: not claims.look(number)[0])
        assert alive(benchmark.family)
        assert traces(benchmark.name)
        assert number in keeper.clean()
        until_gone(benchmark.name, benchmark.family)
        assert survivor.poll() is None
        assert len(traces(living.hosts[0].name)) == 4


def test_a_new_lab_takes_a_dead_ones_number_and_removes_what_it_left(namespaces):
    with owner() as benchmark:
        kill(benchmark)
        with ExitStack() as stack:
            while benchmark.name not in {host.name for host in stack.enter_context(Lab(1)).hosts}:
                assert len(traces(benchmark.name)) > 4
            assert alive(benchmark.family) == []
            assert len(traces(benchmark.name)) == 4


def test_without_root_a_lab_says_what_to_do(namespaces):
    script = """
import os
from lab import Lab, LabUnavailable
os.setuid(65534)
try:
    Lab(hosts=2, mbit=100).__enter__()
except LabUnavailable as error:
    print(error)
"""
    done = run_command(sys.executable, "-S", "-c", script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "needs root: run it with sudo, or use Lab.loopback()" in done.stdout


def test_without_its_tools_a_lab_says_what_to_install(namespaces, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    before = claims.known()
    with pytest.raises(LabUnavailable, match="`ip` is missing: install the package iproute2"):
        Lab(2).__enter__()
    assert set(claims.known()) <= set(before)


def test_what_the_kernel_refuses_is_told_and_removed(namespaces, monkeypatch, tmp_path):
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Specified qdisc kind is unknown.' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = claims.known()
    with pytest.raises(LabUnavailable, match=r"`tc .*` failed: Specified qdisc kind is unknown"):
        Lab(2, 100).__enter__()
    assert set(claims.known()) <= set(before)
