"""Ranks die and the others go on: each call's result is the same everywhere, and all or nothing."""

import gc
import math
import random
import signal
import sys
import time
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from harness.pool import Pool
from harness.ranks import Ranks
from reducer.errors import RankLostError
from tests.integration.calls import all_reduce, ones
from tests.integration.elastic_rank import IN_FLIGHT
from tests.ranks import Loopback
from tests.waits import eventually
from worker_client.collectives import broadcast_bytes_from_any

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")

PATIENCE_S = 60.0
MODULE = "tests.integration.elastic_rank"


class Job:
    """Ranks that all-reduce, their reducers, and what they have said."""

    def __init__(self, ranks, pool, workers):
        self.ranks = ranks
        self.pool = pool
        self.alive = set(range(workers))
        self.values = defaultdict(dict)  # by call and rank
        self.calls = [0] * workers
        self.present = {}
        self.errors = {}
        self.ended = set()

    def kill(self, rank):
        self.alive.discard(rank)
        self.ranks.kill(rank)

    def until(self, done):
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                raise self.ranks.stalled(f"calls {self.calls}, errors {self.errors}")
            self._take(self.ranks.hear(0.05))

    def _take(self, said):
        if said is None:
            return
        rank = said["rank"]
        if said["event"] == "error":
            self.errors[rank] = said["error"]
            return
        self.present[rank] = said["present"]
        if said["event"] == "end":
            self.ended.add(rank)
        else:
            self.values[said["call"]][rank] = said["value"]
            self.calls[rank] = said["call"] + 1

    def progress(self, calls):
        goal = max(self.calls) + calls
        self.until(lambda: min(self.calls[rank] for rank in self.alive) >= goal)

    def go_on(self):
        """Wait until those that are left have made some calls without the others."""
        self.until(lambda: all(set(self.present[rank]) == self.alive for rank in self.alive))
        self.progress(12)

    def rest(self, seconds):
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def finish(self):
        self.ranks.tell(str(max(self.calls) + 40))
        self.until(lambda: self.ended >= self.alive)
        self.until(lambda: not self.ranks.running)

    def memberships(self):
        """Whose contributions are in each call's result, after a look whether all have the same."""
        for call in sorted(self.values):
            values = {rank: self.values[call].get(rank) for rank in self.alive}
            assert len(set(values.values())) == 1, f"call {call}: {values}"
            yield whose(call, next(iter(values.values())), len(self.calls))


def whose(call, value, workers):
    assert isinstance(value, float), f"call {call}: {value}"
    for size in range(1, workers + 1):
        for ranks in combinations(range(workers), size):
            right = sum(100**rank for rank in ranks) / (size if call % 2 else 1)
            if math.isclose(value, right, rel_tol=1e-12):
                return frozenset(ranks)
    raise AssertionError(f"call {call}: nobody's sum is {value}")


def run(workers, reducers, action, module=MODULE, rest_s=0.0):
    with Loopback(workers + reducers) as lab:
        pool = Pool(lab.hosts[workers:]) if reducers else None
        addresses = pool.addresses if pool else []
        environment = {"REST_S": str(rest_s), **({} if pool else {"MEET": "1"})}
        try:
            with Ranks(module, lab.hosts[:workers], {}, addresses, environment) as ranks:
                job = Job(ranks, pool, workers)
                job.progress(8)
                action(job)
                job.finish()
        finally:
            if pool:
                pool.stop()
    return job


def assert_went_on(job):
    assert job.errors == {}
    assert all(set(job.present[rank]) == job.alive for rank in job.alive)
    found = list(job.memberships())
    assert found[0] == frozenset(range(len(job.calls)))
    assert found[-1] == job.alive
    # Of calls that were in flight together, a later one may have been finished with a rank that an
    # earlier one was made again without.
    steps = [found[at : at + IN_FLIGHT] for at in range(0, len(found), IN_FLIGHT)]
    for earlier, later in pairwise(steps):
        assert frozenset.union(*later) <= frozenset.intersection(*earlier)


def lose_in_turn(*victims):
    def action(job):
        for victim in victims:
            job.kill(victim)
            job.go_on()

    return action


@pytest.mark.extended_cases("compiled-3-1")
@pytest.mark.parametrize(("workers", "reducers"), [(4, 2), (3, 1), (3, 0)])
def test_the_others_go_on_when_a_rank_dies(impl, workers, reducers):
    assert_went_on(run(workers, reducers, lose_in_turn(1)))


@pytest.mark.extended("test_the_others_go_on_when_a_rank_dies")
@pytest.mark.parametrize("reducers", [2, 0])
def test_a_rank_dies_while_the_others_compute(reducers):
    assert_went_on(run(3, reducers, lose_in_turn(1), rest_s=0.3))


@pytest.mark.extended("test_the_others_go_on_when_a_rank_dies")
def test_the_first_rank_is_like_any_other():
    assert_went_on(run(3, 2, lose_in_turn(0)))


@pytest.mark.extended("test_the_others_go_on_when_a_rank_dies")
def test_one_rank_after_another_dies_down_to_the_last():
    assert_went_on(run(5, 2, lose_in_turn(4, 2, 1, 3)))


@pytest.mark.extended("test_a_minority_does_not_go_on")
@pytest.mark.parametrize("seed", range(3))
def test_several_die_at_about_the_same_time(seed):
    rng = random.Random(seed)

    def action(job):
        for victim in rng.sample(range(5), 2):
            job.kill(victim)
            job.rest(rng.choice((0.0, 0.3, 1.0, 1.3)))
        job.go_on()

    assert_went_on(run(5, 3, action))


@pytest.mark.extended("test_the_others_go_on_when_a_rank_dies")
def test_a_reducer_dies_with_a_rank():
    def action(job):
        assert job.pool is not None
        job.kill(2)
        job.pool.end(1, signal.SIGKILL)
        job.go_on()
        job.pool.end(0, signal.SIGKILL)
        job.progress(12)

    assert_went_on(run(4, 3, action))


def test_a_loss_is_logged_with_those_that_go_on(job, caplog):
    clients = job(3, on_rank_lost="continue")
    all_reduce(clients)
    clients.pop(1).shutdown()
    for work in [client.all_reduce(ones()) for client in clients]:
        work.wait(30)
    said = [one.getMessage() for one in caplog.records if "going on" in one.msg]
    assert said == [
        "going on without rank 1; ranks that go on: 0, 2 (numbered from 0 on at the reducers)"
    ] * len(clients)


@pytest.mark.parametrize("roots", [(0, 0), (0, 1), (2, 0)], ids=str)
def test_a_broadcast_comes_from_the_first_that_is_left(job, roots):
    """Whichever root the others ask for, as one of them may know already that rank 0 has gone."""
    clients = job(3, on_rank_lost="continue")
    all_reduce(clients)
    clients.pop(0).shutdown()
    ask = [
        partial(broadcast_bytes_from_any, client, np.full(9, client.rank, np.uint8), root, "it")
        for client, root in zip(clients, roots, strict=True)
    ]
    with ThreadPoolExecutor() as threads:
        found = [one.result(30) for one in [threads.submit(each) for each in ask]]
    assert [(list(data), root) for data, root in found] == [([1] * 9, 1)] * 2


@pytest.mark.parametrize("lost", [0, 1], ids=["that gave the others its buffers", "of the others"])
def test_a_ddp_training_goes_on_without_a_rank(lost):
    pytest.importorskip("torch", reason="needs torch")
    job = run(3, 2, lose_in_turn(lost), "tests.integration.elastic_ddp")
    assert job.errors == {}
    one, other = {0, 1, 2} - {lost}
    assert set(job.present[one]) == set(job.present[other]) == {one, other}
    for step, weights in job.values.items():
        assert weights[one] == weights[other], f"step {step}"
    assert len({weights[one] for weights in job.values.values()}) == len(job.values)


def test_a_minority_does_not_go_on():
    def action(job):
        for victim in (0, 1, 2):
            job.kill(victim)
        job.until(lambda: job.errors.keys() == job.alive)
        job.ended |= job.alive

    job = run(5, 2, action)
    assert set(job.errors) == {3, 4}
    assert all(error.startswith("RankLostError: rank ") for error in job.errors.values())


def test_calls_that_fail_for_want_of_ranks_keep_nothing(job):
    def failed(client):
        data = ones()
        try:
            client.all_reduce(data).wait(30)
        except RankLostError:
            return weakref.ref(data)
        pytest.fail("it goes on alone")

    clients = job(3, on_rank_lost="continue")
    all_reduce(clients)
    last = clients.pop()
    for client in clients:
        client.shutdown()
    there = [failed(last) for _ in range(5)]
    eventually(lambda: gc.collect() >= 0 and not any(one() is not None for one in there))
