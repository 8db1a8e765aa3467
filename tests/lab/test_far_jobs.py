"""Jobs whose ranks and reducers are far apart: nobody is lost who is only late."""

import json
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from harness import pool
from lab import Lab
from tests.ranks import environments
from torture.fault_job import Job
from worker_client.protocol.flow_control import MOST_BYTES, MOST_FAR_BYTES
from worker_client.protocol.joining import auto_streams

pytestmark = pytest.mark.extended(
    "tests/transport/test_guard_members.py::test_each_job_is_patient",
    "tests/worker_client/test_flow_control.py::test_lost_packets_hold_up",
)

ROUND_TRIP_S = 0.2
PATIENCE_S = 1.0  # by default, where the network is near
PAUSE_S = 1.3  # longer than that, and shorter than with five round trips more
UNREACHABLE_S = 0.5  # that a rank may take to come back
WORKERS = 2
ELEMENTS = 16 * 1024
GROWN_S = 60.0  # at most until a window has grown


@contextmanager
def far_job(loss_percent=0):
    """Two ranks and a reducer that are working."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    lab = Lab(WORKERS + 1, 100, round_trip_ms=1000 * ROUND_TRIP_S, loss_percent=loss_percent)
    with lab:
        (reducer,) = pool.start(lab.hosts[WORKERS:])
        try:
            with Job(lab, lab.hosts[:WORKERS], [reducer.address]) as job:
                job.begin(ELEMENTS)
                assert job.wait_for_steps(3, 20)
                yield job, reducer
        finally:
            reducer.stop()


def check(job, more):
    """So many more all-reduces end well, and nobody has been lost."""
    assert job.wait_for_steps(job.done + more, 40)
    assert [told.failure for told in job.told] == [None] * WORKERS
    assert [told.losses for told in job.told] == [[]] * WORKERS
    assert all(step.wrong == 0 for told in job.told for step in told.steps)
    assert not any(told.over for told in job.told)


@pytest.mark.parametrize("who", ["rank", "reducer"])
def test_who_is_silent_for_some_round_trips_more_is_not_lost(namespaces, who):
    with far_job() as (job, reducer):
        tell = reducer.process.send_signal if who == "reducer" else job.ranks[1].signal
        tell(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        tell(signal.SIGCONT)
        check(job, 3)


def test_connections_that_break_go_on(namespaces):
    with far_job() as (job, reducer):
        to = ["dst", reducer.address.partition(":")[0]]
        for rank in job.ranks:
            reset = rank.host.start(["ss", "-H", "-K", "-t", *to], stdout=PIPE)
            assert reset.communicate()[0].count("\n") == auto_streams(ROUND_TRIP_S)
            check(job, 3)


def test_who_is_silent_for_longer_is_named(namespaces):
    with far_job() as (job, _):
        job.ranks[1].signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert job.wait_for_failure(20, [0])
        failure = job.told[0].failure
        assert failure is not None
        assert (failure.error, failure.rank) == ("RankLostError", 1)
        lasted = PATIENCE_S + 5 * ROUND_TRIP_S
        assert lasted < failure.at - stopped < lasted + UNREACHABLE_S + ROUND_TRIP_S + 1


def test_one_percent_of_packets_lost_on_the_way_loses_nobody(namespaces):
    with far_job(loss_percent=1) as (job, _):
        check(job, 15)


def test_a_window_grows_beyond_what_the_reducer_sets_aside(namespaces):
    """It asks for what a fast link holds, and the reducer grants that over a real connection."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    with Lab(2, 800, round_trip_ms=1000 * ROUND_TRIP_S) as lab:
        worker, far = lab.hosts
        (reducer,) = pool.start([far])
        settings = environments(1, [reducer.address])[0]
        command = [sys.executable, "-m", "tests.lab.far_rank", str(GROWN_S)]
        try:
            rank = worker.start(command, env=settings, stdout=PIPE)
            said = json.loads(rank.communicate(timeout=3 * GROWN_S)[0])
        finally:
            reducer.stop()
    assert (said["wrong"], said["losses"]) == (0, 0)
    assert said["usual"] <= MOST_BYTES < said["latest"] <= MOST_FAR_BYTES
