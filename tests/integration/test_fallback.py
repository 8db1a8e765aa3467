"""All reducers die, and the job goes on through the process group: no call is lost or wrong."""

import signal
import sys
import time
from collections import defaultdict

import pytest

pytest.importorskip("torch", reason="needs torch")


from harness.pool import Pool
from harness.ranks import Ranks
from reducer.errors import ConfigError
from tests.conftest import local_pool
from tests.ranks import Loopback
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")

PATIENCE_S = 60.0
RANK_LOST_S = 5.0  # gloo hears of a closed connection at once; the rest is a busy machine


class Job:
    """Ranks that all-reduce, their reducers, and what they have said."""

    def __init__(self, ranks, pool, workers):
        self.ranks = ranks
        self.pool = pool
        self.steps = [0] * workers
        self.fallbacks = [0] * workers
        self.returns = [0] * workers
        self.errors = defaultdict(list)
        self.ends = {}

    def until(self, done):
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise self.ranks.stalled(f"steps {self.steps}, errors {dict(self.errors)}")
            self._hear(0.05)

    def _hear(self, patience_s):
        said = self.ranks.hear(patience_s)
        if said is None:
            return False
        if said["event"] == "end":
            self.ends[said["rank"]] = said
        else:
            self.steps[said["rank"]] = said["step"] + 1
            self.fallbacks[said["rank"]] = said["fallbacks"]
            self.returns[said["rank"]] = said["returns"]
            if said["error"]:
                self.errors[said["rank"]].append(said["error"])
        return True

    def progress(self, steps):
        self.until(lambda: not self._hear(0.0))  # what they have said in the meantime
        goal = max(self.steps) + steps
        self.until(lambda: min(self.steps) >= goal or bool(self.errors))
        assert self.errors == {}

    def back(self, returns):
        """Wait until all ranks have gone back to reducers so often, and go on there."""
        self.until(lambda: min(self.returns) >= returns or bool(self.errors))
        self.progress(2)  # what was under way
        fallbacks = list(self.fallbacks)
        self.progress(5)
        assert self.fallbacks == fallbacks

    def settle(self):
        """Wait until all ranks go on at reducers, however often they have gone back before."""
        end = time.monotonic() + PATIENCE_S
        fallbacks = []
        while self.fallbacks != fallbacks:
            assert time.monotonic() < end
            fallbacks = list(self.fallbacks)
            self.progress(5)

    def finish(self):
        self.ranks.tell("stop")
        self.until(lambda: not self.ranks.running)


def run(workers, reducers, action, **others):
    with Loopback(workers + reducers) as lab:
        pool = Pool(lab.hosts[workers:])
        environment = {"REDUCTION_FALLBACK": "process-group", **others}
        module = "tests.integration.fallback_rank"
        try:
            with Ranks(module, lab.hosts[:workers], {}, pool.addresses, environment) as ranks:
                job = Job(ranks, pool, workers)
                job.progress(3)
                action(job)
                job.finish()
        finally:
            pool.stop()
    return job


def assert_went_on(job, times=1, back=0):
    assert job.errors == {}
    assert len(job.ends) == len(job.steps)
    for end in job.ends.values():
        assert end["said"] == times
        assert end["back"] == end["returns"] == back
        assert end["fallbacks"] > 0
        assert end["differ"].startswith("MismatchError: ")
        assert "total_bytes" in end["differ"]
        assert end["after"] == ""


@pytest.mark.extended_cases("killed-3", "killed-4", "drained-2", "drained-4")
@pytest.mark.parametrize(("workers", "reducers"), [(3, 2), (2, 1), (4, 3)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_the_job_goes_on_when_no_reducer_is_left(workers, reducers, number):
    def lose_all(job):
        for reducer in range(reducers):
            job.pool.end(reducer, number)
        job.progress(10)

    assert_went_on(run(workers, reducers, lose_all))


@pytest.mark.extended_cases("3")
@pytest.mark.parametrize(("workers", "times"), [(2, 1), (3, 3)])
def test_reducers_that_come_back_are_used_again(workers, times):
    def come_and_go(job):
        for time_ in range(times):
            for reducer in range(2):
                job.pool.end(reducer, signal.SIGKILL)
            job.progress(2)
            for reducer in range(2):
                job.pool.start(reducer)
            job.back(time_ + 1)

    job = run(workers, 2, come_and_go)
    assert_went_on(job, times, times)
    assert all(end["in_use"] == [True, True] for end in job.ends.values())


@pytest.mark.extended("test_reducers_that_come_back_are_used_again[2-1]")
def test_one_reducer_that_comes_back_is_enough():
    def come_back(job):
        for reducer in range(2):
            job.pool.end(reducer, signal.SIGKILL)
        job.progress(2)
        job.pool.start(1)
        job.back(1)

    job = run(2, 2, come_back)
    assert_went_on(job, back=1)
    assert all(end["in_use"] == [False, True] for end in job.ends.values())


@pytest.mark.extended("test_reducers_that_come_back_are_used_again[2-1]")
def test_reducers_that_come_and_go_at_once_cost_nothing():
    def flicker(job):
        for _ in range(3):
            job.pool.end(0, signal.SIGKILL)
            job.progress(2)
            job.pool.start(0)
            time.sleep(0.3)  # some ranks may have joined it, or gone back, and others not
        job.settle()

    job = run(3, 1, flicker)
    for end in job.ends.values():
        assert end["differ"].startswith("MismatchError: ")
        assert end["after"] == ""
    assert job.errors == {}


def test_it_serves_a_job_that_would_go_on_without_lost_ranks():
    def lose_all(job):
        job.pool.end(0, signal.SIGKILL)
        job.progress(5)

    assert_went_on(run(3, 1, lose_all, REDUCTION_ON_RANK_LOST="continue"))


@pytest.mark.extended("test_the_job_goes_on_when_no_reducer_is_left[drained-3-2]")
def test_one_reducer_after_another_is_lost():
    def lose_all(job):
        for reducer in range(3):
            job.pool.end(reducer, signal.SIGKILL)
            job.progress(5)
            assert all(job.fallbacks) if reducer == 2 else not any(job.fallbacks)

    assert_went_on(run(2, 3, lose_all))


def test_without_a_process_group_it_says_what_to_do(monkeypatch):
    monkeypatch.setenv("REDUCTION_FALLBACK", "process-group")
    with (
        local_pool(1) as servers,
        pytest.raises(ConfigError, match="init_process_group"),
    ):
        connect(servers=servers, rank=0, world_size=1)
