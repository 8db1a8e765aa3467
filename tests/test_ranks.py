"""Ranks are real processes: how they end, what stops them, what they find; and none is left."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks import RESULT, ROOT, Loopback, environments, fork_server, ranks, run
from tests.waits import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

WAIT_S = 30.0
SLEEP = "print('sleeps', flush=True); import time; time.sleep(600)"


def state(process):
    """The process's state, one letter, as /proc has it."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('enough')", 1, "enough\n"),
        ("def f():\n    1 / 0\nf()", 1, 'File "<string>", line 2, in f\nZeroDivisionError'),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "Interrupt"),
        ("import atexit; atexit.register(lambda: print('goodbye'))", 0, "goodbye\n"),
    ],
    ids=["well", "code", "words", "error", "killed", "aborted", "interrupted", "atexit"],
)
def test_how_a_rank_ends(code, ends, says, fresh):
    with ranks(environments(1), "-c", code, fresh=fresh) as (rank,):
        assert rank.wait(WAIT_S) == ends
        said = rank.out + rank.err
    assert said.startswith("Traceback") == ("Error" in says or "Interrupt" in says)
    # Newer versions of Python mark the place between the lines.
    assert all(part in said for part in says.split("\n"))


def test_it_can_be_stopped_and_goes_on():
    with ranks(environments(1), "-c", "print(input(), flush=True)", talk=True) as (rank,):
        rank.send_signal(signal.SIGSTOP)
        eventually(lambda: state(rank) == "T")
        rank.stdin.write("heard\n")
        rank.stdin.flush()
        rank.send_signal(signal.SIGCONT)
        assert rank.stdout.readline() == "heard\n"
        assert rank.wait(WAIT_S) == 0


@pytest.mark.parametrize("fresh", [False, True])
def test_its_environment_is_what_was_given(fresh, monkeypatch):
    monkeypatch.setenv("NOT_FOR_RANKS", "1")
    given = {"RANK": "1", "REDUCTION_JOB": "given", "LC_CTYPE": "C.UTF-8"}
    code = "import json, os; print(json.dumps([dict(os.environ), os.popen('env').read()]))"
    with ranks([given], "-c", code, fresh=fresh) as job:
        found, of_its_children = json.loads(job.outputs()[0])
    assert found.pop(RESULT).endswith(".json")
    assert found == given
    assert "NOT_FOR_RANKS" not in of_its_children
    assert "REDUCTION_JOB=given" in of_its_children


FACTS = """
import json, os, random, signal, sys
import numpy
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD)],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "files": [fd for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")],
    "dice": [random.random(), numpy.random.random()],
}))
"""


def test_it_finds_what_a_new_interpreter_would():
    forked, fresh = (facts(fresh) for fresh in (False, True))
    assert not set(forked[0].pop("dice")) & set(forked[1].pop("dice"))
    # An interpreter ignores Ctrl-C if this one does, as in the background of a shell.
    assert forked[0].pop("signals") == [str(signal.default_int_handler), str(signal.SIG_DFL)]
    del fresh[0]["dice"], fresh[0]["signals"]
    assert forked[0] == fresh[0]
    assert forked[0]["arguments"] == ["-c", "one", "two"]


def facts(fresh):
    with ranks(environments(2), "-c", FACTS, "one", "two", fresh=fresh) as job:
        return [json.loads(said) for said in job.outputs()]


def test_scripts_and_modules_run_as_python_runs_them(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, sys\nfrom tests.ranks import write_result\n"
        "if __name__ == '__main__':\n    write_result([beside.NAME, *sys.argv])\n"
    )
    assert run(environments(1), script, "last") == [["beside", str(script), "last"]]
    given = [{**environments(1)[0], "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}]
    assert run(given, "-m", "script", "last") == [["beside", str(script), "last"]]


def test_torch_is_imported_already_and_what_is_tested_is_not():
    pytest.importorskip("torch", reason="needs torch")
    with ranks(environments(2), "-c", "import sys; print(*sys.modules)") as job:
        for said in job.outputs():
            imported = said.split()
            assert {"torch", "torch.distributed", "torch._dynamo"} <= set(imported)
            assert not {name.partition(".")[0] for name in imported} & {"reducer", "worker_client"}


def test_the_fork_server_has_one_thread():
    assert len(list(Path(f"/proc/{fork_server().process.pid}/task").iterdir())) == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_no_rank_is_left(monkeypatch, *, fresh):
    monkeypatch.setattr("tests.ranks.STOP_S", 0.2)
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n" + SLEEP
    left = []
    with (  # noqa: PT012
        pytest.raises(KeyError),
        ranks(environments(3), "-c", code, fresh=fresh) as job,
    ):
        eventually(lambda: all("sleeps" in rank.out for rank in job))
        job[1].send_signal(signal.SIGSTOP)
        job[2].kill()
        left = [psutil.Process(rank.pid) for rank in job]
        left += [psutil.Process(int(rank.out.split()[0])) for rank in job]
        raise KeyError
    # An interpreter is asked to end first; one that is stopped may hear that before it is killed.
    ends = {-signal.SIGKILL, -signal.SIGTERM} if fresh else {-signal.SIGKILL}
    assert {rank.returncode for rank in job} <= ends
    eventually(lambda: not any(map(alive, left)))


def alive(process):
    # The child of a rank that has ended stays listed until init reaps it.
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_say_why_when_one_fails(monkeypatch):
    monkeypatch.setattr("tests.ranks.OTHERS_S", 0.2)
    code = f"import os\nif os.environ['RANK'] == '1': raise OSError('no more')\n{SLEEP}"
    with ranks(environments(2), "-c", code) as job, pytest.raises(AssertionError) as failure:
        job.results()
    text = str(failure.value)
    assert "-- rank 0 still ran\nFatal Python error: Aborted" in text
    assert "-- rank 1 ended with code 1\nTraceback" in text
    assert "OSError: no more" in text


def test_a_killed_rank_has_no_result():
    code = (
        "import os, signal\nfrom tests.ranks import write_result\n"
        "if os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\nwrite_result([1])"
    )
    with ranks(environments(2), "-c", code) as job:
        assert job.results(killed=[0]) == [[1]]
        with pytest.raises(AssertionError, match="rank 0 ended with code -9"):
            job.results()


def test_processes_on_loopback_end_with_it():
    with Loopback(2) as lab:
        process = lab.hosts[1].start([sys.executable, "-c", SLEEP], stdout=-1)
        assert process.stdout.readline() == "sleeps\n"
    assert process.returncode == -signal.SIGKILL
