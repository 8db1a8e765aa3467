"""Ranks that all-reduce in memory while others are killed and join, and what they have got."""

import threading
import time
from array import array
from collections import defaultdict

import numpy as np

from reducer.errors import ReductionError
from reducer.wire.constants import DType, ReduceOp
from tests.memberships.jobs import Member, World
from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.membership import Membership
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import JobSpec

STEPS = 40
IN_FLIGHT = 3  # all-reduces of one step
ADMIT_EVERY = 3  # steps
MOST_S = 20.0  # for a training: one takes less than a second


class KilledError(Exception):
    """This rank's process is gone."""


class Training:
    """One training, as the seed has it.

    Attributes:
        results: by step and place in it, what each rank has got: who contributed, and their sum.
        errors: of ranks that were not killed.
    """

    def __init__(self, seed):
        self.world = World(seed)
        self.results = defaultdict(dict)
        self.errors = []
        chance = self.world.random
        self._size = chance.randint(3, 5)
        self._joins = sorted(chance.sample(range(0, STEPS, ADMIT_EVERY), chance.randint(0, 3)))
        # A majority of the first ranks stays. Some are killed while others join.
        moments = [*self._joins, chance.randrange(STEPS)]
        self._kills = [chance.choice(moments) for _ in range((self._size - 1) // 2)]
        self._ranks = []
        self._wanted = 0
        self._lock = threading.RLock()

    def run(self, most_s=MOST_S):
        """Run it until all ranks that were not killed have made all steps.

        Args:
            most_s: that it may take.

        Raises:
            AssertionError: they do not, or the results are wrong.
        """
        for rank in range(self._size):
            membership = Membership.whole(spec_of(rank, self._size))
            self._ranks.append(Rank(self, membership, joins=False))
        for one in list(self._ranks):
            one.start()
        try:
            self._await_ends(time.monotonic() + most_s)
            self._check()
        finally:
            for one in list(self._ranks):
                one.kill()
            self.world.stop()

    def _await_ends(self, until):
        # A rank that nobody has let in, because others were lost, would wait for another chance.
        while alive := [one.number for one in list(self._ranks) if one.is_alive() and one.is_in]:
            assert time.monotonic() < until, f"ranks {alive} are not done: {self.where()}"
            time.sleep(0.002)

    def where(self):
        """Say how far each rank is."""
        return ", ".join(f"{rank.number}: {rank.where}" for rank in self._ranks)

    def begins(self, step):
        """Kill whom the seed wants killed when a rank is in this step, and want who is to join."""
        with self._lock:
            chance = self.world.random
            for at in [at for at in self._kills if at <= step]:
                self._kills.remove(at)
                victims = [one for one in self._ranks if one.is_in and not one.killed]
                victim = chance.choice(victims)
                self.world.later(victim.kill)
            while self._joins and self._joins[0] <= step:
                self._joins.pop(0)
                self._wanted += 1

    def lets_in(self, rank):
        """Return how many ranks are ready to join, if it is this rank that lets them in."""
        elastic = rank.elastic
        if not self._wanted or elastic.present[0] != rank.number:
            return 0
        with self._lock:
            self._wanted -= 1
            base = spec_of(elastic.world_size, elastic.world_size + 1)
            membership = Membership.whole(base).without(elastic.lost, ())
            newcomer = Rank(self, membership, joins=True)
            self._ranks.append(newcomer)
        newcomer.start()
        return 1

    def _check(self):
        assert self.errors == []
        survivors = {rank.number for rank in self._ranks if rank.is_in}
        assert survivors, "nobody is left"
        for (step, place), everybodys in sorted(self.results.items()):
            # What only a rank has got that has died since, the others may have made without it.
            got = {rank: result for rank, result in everybodys.items() if rank in survivors}
            assert len(set(got.values())) == 1, f"step {step}.{place}: {got}"
            (who, total) = next(iter(got.values()))
            members = [rank for rank in range(64) if who >> rank & 1]
            assert set(got) <= set(members), f"{set(got)} have a result of {members}"
            assert total == sum(value(rank, step, place) for rank in members)
        last = self.results[STEPS - 1, IN_FLIGHT - 1].keys()
        assert survivors <= set(last), f"{survivors} are left, and {set(last)} have ended"


class Rank(threading.Thread):
    """One rank's process."""

    def __init__(self, training, membership, *, joins):
        super().__init__(daemon=True)
        self.number = membership.all.rank
        self.killed = False
        self.is_in = not joins
        self.where = "before its first step"
        self._training = training
        self._joins = joins

        def enter(spec, left):
            return Member(training.world, id(self), spec, left)

        self.elastic = ElasticCommunicator(
            membership, enter, lambda: None, timeout_s=60.0, connect_timeout_s=10.0, joins=joins
        )

    def kill(self):
        self.killed, self.is_in = True, False
        self._training.world.kill(id(self))
        self.elastic._closing = True  # its threads look at this, and end

    def run(self):
        try:
            self._train()
        except KilledError:
            pass
        except (ReductionError, AssertionError) as error:
            if not self.killed and self.is_in:
                self._training.errors.append(f"rank {self.number}, {self.where}: {error!r}")

    def _train(self):
        elastic, step = self.elastic, 0
        if self._joins:
            self.where = "joining"
            elastic.arrive()
            self._await(lambda: elastic.await_members(timeout_s=0.01))
            elastic.admit(0, 60.0)
            self.is_in = True
            step = self._agree_on(0)
        while step < STEPS:
            self.where = f"step {step}"
            self._training.begins(step)
            if step % ADMIT_EVERY == 0 and not self._joins and self._admit():
                step = self._agree_on(step)
            self._joins = False  # the others have just let this one in, in this step
            pending = [self._submit(step, place) for place in range(IN_FLIGHT)]
            for place, (data, ended) in enumerate(pending):
                self._await(lambda: bool(ended))  # noqa: B023 (within this turn)
                assert ended == [None], f"step {step}.{place} ended with {ended}"
                who, total = np.frombuffer(data, np.int64)
                self._training.results[step, place][self.number] = int(who), int(total)
            step += 1
        self.where = "at the end"
        # Nobody leaves before all have all results, as a barrier at a script's end sees to.
        _, ended = self._all_reduce([1], ReduceOp.SUM)
        self._await(lambda: bool(ended))

    def _admit(self):
        """Let in who is ready; return whether somebody has joined, as all find alike."""
        joined = self.elastic.admit(self._training.lets_in(self), 60.0)
        if joined:
            self.elastic.admit(0, 60.0)  # what settling in does: all are there
        return joined

    def _agree_on(self, step):
        data, ended = self._all_reduce([step], ReduceOp.MAX)
        self._await(lambda: bool(ended))
        assert ended == [None]
        return int(np.frombuffer(data, np.int64)[0])

    def _submit(self, step, place):
        return self._all_reduce([1 << self.number, value(self.number, step, place)], ReduceOp.SUM)

    def _all_reduce(self, values, op):
        data, ended = bytearray(array("q", values)), []
        view = memoryview(data)
        operation = Operation(view, DType.INT64, op, None, 60.0, call=object(), ended=ended.append)
        if self.killed:
            raise KilledError
        self.elastic.submit(operation)
        return data, ended

    def _await(self, done):
        while not done():
            if self.killed:
                raise KilledError
            time.sleep(0.0005)


def value(rank, step, place):
    """Return what a rank contributes to an all-reduce: another number for each."""
    return (rank + 1) * 1_000_003 + step * 101 + place


def spec_of(rank, world_size):
    return JobSpec("j", 0, rank, world_size, ("r:1",), 0, elastic=True, process=str(rank))
