"""However a lab ends, nothing of it stays: processes, namespaces, names, claims."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import psutil
import pytest

from lab import Lab, LabUnavailable, claims
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
        told = dict(name=lab.hosts[0].name, family=family, keeper=lab._keeper.pid, child=child)
        print(json.dumps(told), flush=True)
    time.sleep(1000)
"""


@contextmanager
def owner(*options):
    """A benchmark in a process of its own, and its lab."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", OWNER, json.dumps(FAMILY), *options],
        cwd=ROOT,
        stdout=PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield SimpleNamespace(process=process, **json.loads(process.stdout.readline()))
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
    return process, [process.pid, int(process.stdout.readline())]


@pytest.mark.parametrize("failure", ["", "interrupt", "the keeper is killed"])
def test_the_end_of_the_block_ends_everything(kind, failure):
    with ExitStack() as stack:
        if failure == "interrupt":
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        with make(kind) as lab:
            name = lab.hosts[0].name
            process, family = start_family(lab.hosts[1])
            assert alive(family) == family
            assert kind == "loopback" or len(traces(name)) == 6
            if failure == "interrupt":
                raise KeyboardInterrupt
            if failure:
                own_keeper().kill()
    assert alive(family) == []
    assert traces(name) == []
    assert process.returncode == -signal.SIGKILL
    assert process.stdout.closed


def test_a_process_that_sheds_environment_and_session_still_ends_with_its_host(namespaces):
    with Lab(1) as lab:
        script = "env -i setsid sleep 1000 & echo $!"
        process = lab.hosts[0].start(["sh", "-c", script], stdout=PIPE)
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


def test_a_new_lab_takes_a_dead_ones_number_and_removes_what_it_left(namespaces):
    with owner() as benchmark:
        os.kill(benchmark.keeper, signal.SIGKILL)  # and so nobody removes the lab
        benchmark.process.kill()
        benchmark.process.wait()
        with ExitStack() as stack:
            while benchmark.name not in {host.name for host in stack.enter_context(Lab(1)).hosts}:
                assert len(traces(benchmark.name)) > 4
            assert alive(benchmark.family) == []
            assert len(traces(benchmark.name)) == 4


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("options", "tool", "says"),
    [
        ({}, "", "`ip` is missing: install the package iproute2"),
        ({}, "tc", "`tc .*` failed: not here"),
        ({"round_trip_ms": 20}, "cc", "cannot be compiled: not here"),
    ],
)
def test_what_is_missing_or_refused_is_told_and_what_was_made_is_removed(
    monkeypatch, tmp_path, options, tool, says
):
    if tool:
        (tmp_path / tool).write_text("#!/bin/sh\necho not here >&2; exit 2\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep if tool else None)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    before = claims.known()
    with pytest.raises(LabUnavailable, match=says):
        Lab(2, 100, **options).__enter__()
    assert set(claims.known()) <= set(before)
