"""Ranks that all-reduce in memory while others are killed and join, and what they have got."""

import random
from array import array
from collections import Counter, defaultdict
from functools import partial

import numpy as np

from reducer.errors import LeavesMovedError, ReductionError
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.leaves import Share
from tests.memberships.jobs import Job, Member
from tests.sim.clock import Clock
from tests.sim.threads import Threads
from worker_client import work
from worker_client.communicators import elastic
from worker_client.communicators.membership import Membership
from worker_client.protocol._flight import Call
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import JobSpec

STEPS = 40
IN_FLIGHT = 3  # all-reduces of one step
ADMIT_EVERY = 3  # steps
DELAY_S = 0.004
MOST_S = 25.0  # for a training: one takes 0.4 s, and 10 more if a newcomer does not come


class KilledError(Exception):
    """This rank's process is gone."""


class Training:
    """One training, as the seed has it.

    Attributes:
        clock, threads, jobs: of all ranks.
        results: by step and place in it, what each rank has got: who contributed, and their sum.
        errors: of ranks that were not killed.
        outcome: how many ranks were killed and have joined.
    """

    def __init__(self, seed):
        self.clock = Clock()
        self._chance = chance = random.Random(seed)
        self.threads = Threads(self.clock, chance)
        self.jobs = defaultdict(Job)
        self.results = defaultdict(dict)
        self.errors = []
        self.outcome = Counter()
        self._size = chance.randint(3, 5)
        # Of each step: at least as many as there ever are ranks; 0: its all-reduces have none.
        self.leaves = random.Random(f"leaves {seed}").choice((0, 8, 11))
        self._joins = sorted(chance.sample(range(0, STEPS, ADMIT_EVERY), chance.randint(0, 3)))
        # A majority of the first ranks stays. Some are killed while others join.
        moments = [*self._joins, chance.randrange(STEPS)]
        self._kills = [chance.choice(moments) for _ in range((self._size - 1) // 2)]
        self._ranks = []
        self._wanted = 0

    def run(self):
        """Run it until all ranks that were not killed have made all steps.

        Raises:
            AssertionError: they do not, or the results are wrong.
        """
        with self.threads.used_by(elastic, work):
            for rank in range(self._size):
                self._start(Membership.whole(spec_of(rank, self._size)), joins=False)
            self.clock.run(MOST_S, lambda: not self._at_work())
            assert not self._at_work(), "ranks are not done"
            self._check()

    def _start(self, membership, *, joins):
        rank = Rank(self, membership, joins=joins)
        self._ranks.append(rank)
        rank.thread.start()

    def _at_work(self):
        # A rank that nobody has let in, because others were lost, would wait for another chance.
        return any(rank.is_in and not rank.thread.ended for rank in self._ranks)

    def later(self, action):
        """Have something happen within `DELAY_S`, mostly at once."""
        self.clock.after(DELAY_S * self._chance.random() ** 3, action)

    def describe(self):
        """Say how far each rank is."""
        return [f"rank {rank.number}: {rank.where}" for rank in self._ranks]

    def begins(self, step):
        """Kill whom the seed wants killed when a rank is in this step, and want who is to join."""
        for at in [at for at in self._kills if at <= step]:
            self._kills.remove(at)
            victims = [one for one in self._ranks if one.is_in and not one.killed]
            self.later(self._chance.choice(victims).kill)
            self.outcome["killed"] += 1
        while self._joins and self._joins[0] <= step:
            self._joins.pop(0)
            self._wanted += 1

    def lets_in(self, rank):
        """Return how many ranks are ready to join, if it is this rank that lets them in."""
        job = rank.elastic
        if not self._wanted or job.present[0] != rank.number:
            return 0
        self._wanted -= 1
        base = spec_of(job.world_size, job.world_size + 1)
        self._start(Membership.whole(base).without(job.lost, ()), joins=True)
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
            if self.leaves:
                leaves = range(self.leaves)
                assert total == sum(value(leaf, step, place) for leaf in leaves), f"{step}.{place}"
                continue
            members = [rank for rank in range(64) if who >> rank & 1]
            assert set(got) <= set(members), f"{set(got)} have a result of {members}"
            assert total == sum(value(rank, step, place) for rank in members)
        last = self.results[STEPS - 1, IN_FLIGHT - 1].keys()
        assert survivors <= set(last), f"{survivors} are left, and {set(last)} have ended"


class Rank:
    """One rank's process."""

    def __init__(self, training, membership, *, joins):
        self.number = membership.all.rank
        self.killed = False
        self.is_in = not joins
        self.where = "before its first step"
        self.thread = training.threads.threading.Thread(target=self._run)
        self._training = training
        self._joins = joins
        self._members = []

        def enter(spec, left):
            self._members.append(Member(training, spec, left))
            return self._members[-1]

        self.elastic = elastic.ElasticCommunicator(
            membership, enter, lambda: None, timeout_s=60.0, connect_timeout_s=10.0, joins=joins
        )

    def kill(self):
        """Be gone, now: nothing of what this process does has an effect any more."""
        self.killed, self.is_in = True, False
        for member in self._members:
            member.gone()
        self.elastic._closing = True  # its threads look at this, and end

    def _run(self):
        try:
            self._train()
        except KilledError:
            pass
        except (ReductionError, AssertionError) as error:
            if not self.killed and self.is_in:
                self._training.errors.append(f"rank {self.number}, {self.where}: {error!r}")

    def _train(self):
        step = 0
        if self._joins:
            self.where = "joining"
            self.elastic.begin_joining()
            self.elastic.await_members()
            self.elastic.admit(0, 60.0)
            self.is_in = True
            self._training.outcome["joined"] += 1
            step = self._agree_on(0)
        while step < STEPS:
            self.where = f"step {step}"
            self._training.begins(step)
            if step % ADMIT_EVERY == 0 and not self._joins and self._admit():
                step = self._agree_on(step)
            self._joins = False  # the others have just let this one in, in this step
            if self._training.leaves:
                while not self._sum_leaves(step):
                    self._training.outcome["again"] += 1
                step += 1
                continue
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

    def _sum_leaves(self, step):
        """Make a step of leaves; return false if all ranks make it again."""
        self.elastic.await_members()
        present = self.elastic.present
        share = Share(self._training.leaves, present, present.index(self.number))
        pending = []
        for place in range(IN_FLIGHT):
            computed = []  # a backward pass takes a while, in which ranks may be lost
            self._training.later(partial(computed.append, None))
            self._await(lambda: bool(computed))  # noqa: B023 (within this turn)
            sums = [sum(value(leaf, step, place) for leaf in part) for part in share.parts]
            pending.append(self._all_reduce(sums, ReduceOp.SUM, share))
        for _, ended in pending:
            self._await(lambda: bool(ended))  # noqa: B023 (within this turn)
        errors = [ended[0] for _, ended in pending if ended[0] is not None]
        assert all(isinstance(error, LeavesMovedError) for error in errors), errors
        for place, (data, _) in enumerate(pending):
            if not errors:
                total = np.frombuffer(data, np.int64)[0]
                self._training.results[step, place][self.number] = 0, int(total)
        return not errors

    def _submit(self, step, place):
        return self._all_reduce([1 << self.number, value(self.number, step, place)], ReduceOp.SUM)

    def _all_reduce(self, values, op, leaves=None):
        data, ended = bytearray(array("q", values)), []
        view = memoryview(data)
        operation = Operation(
            view, DType.INT64, op, None, 60.0, call=Call(), ended=ended.append, leaves=leaves
        )
        if self.killed:
            raise KilledError
        self.elastic.submit(operation)
        return data, ended

    def _await(self, done):
        self._training.threads.wait(lambda: done() or self.killed)
        if self.killed:
            raise KilledError


def value(rank, step, place):
    """Return what a rank contributes to an all-reduce, or a leaf: another number for each."""
    return (rank + 1) * 1_000_003 + step * 101 + place


def spec_of(rank, world_size):
    return JobSpec("j", 0, rank, world_size, ("r:1",), 0, elastic=True, process=str(rank))
