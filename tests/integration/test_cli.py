"""The `reducer` command: what it says, how it ends, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from reducer import local_pool
from reducer.errors import ConfigError, ReducerLostError, ReductionError
from tests.commands import serving
from tests.waits import within_s
from worker_client.client.bootstrap import connect

COMMAND = str(Path(sys.executable).with_name("reducer"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_ends_it_in_time(number):
    # The job has no other reducer.
    with serving("--drain-timeout", 1, command=[COMMAND], stderr=subprocess.PIPE) as served:
        process, address, _ = served
        common = {"servers": address, "world_size": 2, "job": "signalled"}
        with connect(rank=0, **common) as zero, connect(rank=1, **common) as one:
            error = None
            for step in range(1_000_000):
                works = [client.all_reduce(np.ones(50_000)) for client in (zero, one)]
                if step == 100:
                    start = time.monotonic()
                    process.send_signal(number)
                try:
                    for work in works:
                        work.wait(10)
                except ReductionError as failure:
                    error = failure
                    break
            assert isinstance(error, ReducerLostError)
            assert address in str(error)
            assert process.wait(20) == 0
            within_s(9, start)  # before the calls would time out
        grace = "1 s" if number == signal.SIGTERM else "0.5 s"
        assert f"goes on for job 'signalled' for {grace} at most" in process.stderr.read()


def test_lines_for_programs():
    given = ("--http", "0", "--log-format", "json")  # those on standard output are such as well
    with serving(*given, stderr=subprocess.PIPE) as (process, address, http):
        assert http.startswith("127.0.0.1:")
        with connect(servers=address, rank=0, world_size=1, job="of lines"):
            pass
        process.terminate()
        lines = [json.loads(line) for line in process.stderr]
    assert all(line["timestamp"] and line["level"] == "info" for line in lines)
    assert [line["event"] for line in lines if line.get("job") == "of lines"] == [
        "job 'of lines': all 1 ranks are here",
        "job 'of lines': rank 0 left the job, the last one",
    ]
    ended = next(line for line in lines if "left" in line["event"])
    assert (ended["rank"], ended["logger"]) == (0, "reducer.engine.engine")
    assert lines[-1]["contributions"] == 0


def test_it_stops_when_standard_input_ends():
    with serving("--stop-at-eof", command=[COMMAND]) as (process, *_):
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_pool_leaves_nothing_behind():
    others = psutil.Process().children()  # pools of other tests' fixtures
    with local_pool(3) as servers:
        assert len(set(servers)) == 3
        processes = set(psutil.Process().children()).difference(others)
        assert len(processes) >= 3
    assert not any(process.is_running() for process in processes)
    with pytest.raises(ConfigError, match="at least 1"), local_pool(0):
        pass


def test_a_pool_ends_with_its_killed_parent():
    code = "import time; from reducer import local_pool\nwith local_pool(2):\n"
    code += " print(1, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_a_pool_that_cannot_start_says_so():
    with pytest.raises(ReducerLostError, match="did not start"), local_pool(1, kernel="mmx"):
        pass
