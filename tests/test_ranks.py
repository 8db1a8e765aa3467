"""Ranks are real processes: how they end, what stops them, what they find; and none is left."""

import json
import signal
import sys

import psutil
import pytest

from tests.ranks import environments, ranks
from tests.waits import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

WAIT_S = 30.0
SLEEP = "print('sleeps', flush=True); import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        ("import sys; sys.exit('enough')", 1, "enough\n"),
        ("def f():\n    1 / 0\nf()", 1, 'File "<string>", line 2, in f\nZeroDivisionError'),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "Interrupt"),
        ("import atexit; atexit.register(lambda: print('goodbye'))", 0, "goodbye\n"),
    ],
    ids=["words", "error", "killed", "aborted", "interrupted", "atexit"],
)
def test_how_a_rank_ends(code, ends, says):
    with ranks(environments(1), "-c", code) as (rank,):
        assert rank.wait(WAIT_S) == ends
        said = rank.out + rank.err
    # Newer versions of Python mark the place between the lines.
    assert all(part in said for part in says.split("\n"))


FACTS = """
import json, os, random, signal, sys
import numpy
print(json.dumps({
    "files": [fd for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")],
    "arguments": sys.argv,
    "environment": [name for name in os.environ if name != "LC_CTYPE"],
    "of children": os.popen("env").read().count("REDUCTION_JOB=given"),
    "path": sys.path,
    "folder": os.getcwd(),
    "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD)],
    "tested": sorted({"reducer", "worker_client"} & sys.modules.keys()),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "dice": [random.random(), numpy.random.random()],
}))
"""


def facts(fresh):
    given = environments(2, REDUCTION_JOB="given")
    with ranks(given, "-c", FACTS, "one", "two", fresh=fresh) as job:
        return [json.loads(said) for said in job.outputs()]


def test_it_finds_what_a_new_interpreter_would(monkeypatch):
    monkeypatch.setenv("REDUCTION_NOT_FOR_RANKS", "1")
    (forked, other), (fresh, _) = facts(fresh=False), facts(fresh=True)
    assert not set(forked.pop("dice")) & set(other.pop("dice"))
    # An interpreter ignores Ctrl-C if this one does, as in the background of a shell.
    assert forked.pop("signals") == [str(signal.default_int_handler), str(signal.SIG_DFL)]
    del fresh["dice"], fresh["signals"]
    assert forked == fresh
    assert (forked["arguments"], forked["of children"]) == (["-c", "one", "two"], 1)
    assert "REDUCTION_NOT_FOR_RANKS" not in forked["environment"]


def test_no_rank_is_left():
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n" + SLEEP
    with pytest.raises(KeyError), ranks(environments(2), "-c", code) as job:  # noqa: PT012
        eventually(lambda: all("sleeps" in rank.out for rank in job))
        job[1].send_signal(signal.SIGSTOP)
        left = [psutil.Process(rank.pid) for rank in job]
        left += [psutil.Process(int(rank.out.split()[0])) for rank in job]
        raise KeyError
    assert {rank.returncode for rank in job} == {-signal.SIGKILL}
    eventually(lambda: not any(map(alive, left)))


def alive(process):
    # The child of a rank that has ended stays listed until init reaps it.
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_rank_has_no_result():
    code = (
        "import os, signal\nfrom tests.ranks import write_result\n"
        "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\nwrite_result([1])"
    )
    with ranks(environments(2), "-c", code) as job:
        assert job.results(killed=[0]) == [[1]]
        with pytest.raises(AssertionError, match="rank 0 ended with code -9"):
            job.results()
