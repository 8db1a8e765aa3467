"""Processes that are stopped: silence counts only for one that ran, and could have heard."""

import os
import re
import signal
import time

import pytest

from reducer import local_pool
from tests.integration.calls import process_of, until_stopped
from tests.ranks import environments, ranks
from tests.waits import within_s

PATIENCE_S = 2.0
UNANSWERED_S = 0.4  # longer than between two heartbeats; twice that is borne
PAUSE_S = PATIENCE_S + 0.5
RANK = """
import sys
import numpy as np
import worker_client
client = worker_client.init()
print("joined", flush=True)
for _ in sys.stdin:
    result = client.all_reduce(np.ones(70_000, np.float32), "sum").wait(20)
    print(result[0], result[-1], client.counters.losses, flush=True)
client.shutdown()
"""

pytestmark = pytest.mark.usefixtures("impl")


def send(number, processes):
    for process in processes:
        os.kill(process, number)
        if number is signal.SIGSTOP:
            until_stopped(process)


def call(job):
    """Have every rank make an all-reduce; return what they print."""
    for rank in job:
        print(file=rank.stdin, flush=True)
    return [rank.stdout.readline().rstrip() for rank in job]


@pytest.mark.extended("tests/integration/test_failures.py", "tests/sim/")
def test_a_pause_of_all_processes_loses_nobody_and_of_one_reducer_that_one():
    settings = {"REDUCTION_JOB": "pauses", "REDUCTION_PATIENCE": f"{PATIENCE_S:g}s"}
    with local_pool(2) as servers:
        reducers = [process_of(server).pid for server in servers]
        with ranks(environments(2, servers, **settings), "-c", RANK, talk=True) as job:
            workers = [rank.pid for rank in job]
            assert [rank.stdout.readline() for rank in job] == ["joined\n"] * 2
            assert call(job) == ["2.0 2.0 0"] * 2
            for first, second in ((reducers, workers), (workers, reducers)):
                # The second are stopped while they wait for the first to answer a heartbeat, ...
                send(signal.SIGSTOP, first)
                time.sleep(UNANSWERED_S)
                send(signal.SIGSTOP, second)
                time.sleep(PAUSE_S)
                # ... and judge before they can have heard anything.
                send(signal.SIGCONT, second)
                time.sleep(UNANSWERED_S)
                send(signal.SIGCONT, first)
                assert call(job) == ["2.0 2.0 0"] * 2
            try:
                send(signal.SIGSTOP, reducers[:1])
                stopped = time.monotonic()
                assert call(job) == ["2.0 2.0 1"] * 2
                within_s(PATIENCE_S + 5.0, stopped)
            finally:
                send(signal.SIGCONT, reducers[:1])
            said = "".join(rank.err for rank in job)
            (seconds, *_) = re.findall(r"no heartbeat for (\d\.\d) s", said)
            assert PATIENCE_S <= float(seconds) <= PATIENCE_S + 0.5
