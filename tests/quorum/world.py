"""Ranks that average by quorum on a virtual clock: stopped, slow, cut off, all as a seed has it.

The decision is the product's (`worker_client.outer.quorum`), and so is the text in the register.
What is here in place of reducers promises no more of an attempt than they do: if all members
contribute, all that get a result get the same; any of them may get an error instead, at any time,
which may blame anybody. A rank learns in steps that have numbers, so what each outer step has
counted can be told.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.sim.clock import Clock
from worker_client.outer.quorum import (
    UNKNOWN,
    Arrival,
    Attempt,
    End,
    Outcome,
    Participant,
    Propose,
    Register,
    Rules,
)

TERMS = (0.7, 0.9)
LOOK_S = 0.05
LIMIT_S = 300.0
Step = tuple[int, int]  # a rank's own, by its number
Contribution = tuple[frozenset[Step], float]  # and its weight
Mean = dict[int, Contribution]  # of each member


@dataclass(frozen=True)
class Faults:
    """What a world is like.

    Attributes:
        ranks: how many there are.
        least: ranks that an averaging needs.
        grace_s: for how long those wait for others.
        timeout_s: for how long a rank waits for so many.
        patience_s: how long a rank may be silent in an attempt.
        periods: averagings of each rank before the last one.
        hostile: chance that something goes wrong at a member of an attempt.
        stops: chance that a rank is stopped, in each period.
        dies: the rank that is stopped for ever, if one is.
        even: whether the ranks are equally fast, and one of them is stopped, once.
        loaded: outer steps that there are at first, of which some ranks lack the last one.
    """

    ranks: int
    least: int
    grace_s: float
    timeout_s: float
    patience_s: float
    periods: int
    hostile: float
    stops: float
    dies: int | None
    even: bool
    loaded: int = 0

    @classmethod
    def of(cls, chance):
        """Return those of a seed: half of them for what is safe, half for what is in time."""
        grace_s = chance.uniform(0.5, 3.0)
        if chance.random() < 0.5:
            return cls(
                8, 7, grace_s, 60.0, chance.choice([0.3, 60.0]), 6, 0.0, 0.0, None, even=True
            )
        ranks = chance.randint(2, 6)
        return cls(
            ranks=ranks,
            least=chance.randint(1, ranks),
            grace_s=grace_s,
            timeout_s=chance.uniform(8.0, 20.0),
            patience_s=chance.choice([0.3, 1.0, 60.0]),
            periods=chance.randint(2, 6),
            hostile=chance.choice([0.0, 0.02, 0.2]),
            stops=chance.choice([0.1, 0.4]),
            dies=chance.randrange(ranks) if chance.random() < 0.2 else None,
            even=False,
            loaded=chance.choice([0, 0, 2]),
        )


class World:
    """One training, as the seed has it.

    Attributes:
        clock: of all ranks, and of the store.
        means: what the outer steps are, by number, as the first rank that has made one has it.
        outcome: how many averagings have ended so, by how.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.faults = Faults.of(self.chance)
        self.clock = Clock()
        self.means = []
        self.outcome = Counter()
        self.text = Register(steps=UNKNOWN if self.faults.loaded else 0).dump()
        self.attempts = {}
        for step in range(self.faults.loaded):
            self.means.append({0: (frozenset({(0, -1 - step)}), 1.0)})
        self.ranks = [Rank(self, rank) for rank in range(self.faults.ranks)]
        if self.faults.loaded:
            for rank in self.ranks[:-1]:
                rank.outer = self.means[: self.chance.choice([1, 2])]
            self.ranks[-1].outer = self.means[:]
        self.ranks[0].learned |= {(0, -1 - step) for step in range(self.faults.loaded)}

    def run(self):
        """Run it until all ranks are done, but for one that is stopped for ever.

        Raises:
            AssertionError: they do not get there, or not in time, or outer steps are wrong.
        """
        for rank in self.ranks:
            rank.start()
        self.clock.run(LIMIT_S, lambda: all(rank.rests for rank in self.ranks))
        self._check()

    def describe(self):
        """Say what is in the register."""
        return [self.text]

    def at(self, due, rank, action):
        """Have something happen then, at a rank when it runs, or elsewhere."""

        def happen():
            if rank is not None and rank.stopped_until > self.clock.now:
                self.at(rank.stopped_until, rank, action)
            else:
                action()

        if due < math.inf:
            self.clock.at(due, happen)

    def later(self, most_s, rank, action):
        """Have something happen within so many seconds."""
        self.at(self.clock.now + self.chance.random() * most_s, rank, action)

    def compare_set(self, expected, desired):
        """Do what the store does, in an instant of its own."""
        if self.text == expected:
            self.text = desired
        return self.text

    def note_mean(self, steps, mean):
        """Hold what a rank has made an outer step of against what others have."""
        if steps == len(self.means):
            earlier = {step for one in self.means for own, _ in one.values() for step in own}
            new = {step for own, _ in mean.values() for step in own}
            assert not earlier & new, f"outer step {steps} counts {earlier & new} again"
            assert len(mean) >= self.faults.least, f"outer step {steps} is of {sorted(mean)} alone"
            for rank, (own, weight) in mean.items():
                right = len(mean) * len(own) / len(new)
                assert math.isclose(weight, right), f"outer step {steps}: rank {rank} has {weight}"
            self.means.append(mean)
        first = self.means[steps]
        assert mean == first, f"outer step {steps} is of {first}, and of {mean}"

    def _check(self):
        for rank in self.ranks:
            number = rank.number
            assert rank.rests, f"rank {number} hangs"
            assert rank.outer == self.means[: len(rank.outer)], f"rank {number} has others"
            nothing = frozenset[Step](), 0.0
            counted = set().union(*(mean.get(rank.number, nothing)[0] for mean in self.means))
            if not rank.done:
                continue
            lost = rank.learned - counted - rank.pending
            assert counted | rank.pending == rank.learned, f"rank {number} has lost {lost}"
            assert not counted & rank.pending, f"rank {number} counts steps again"
            as_others = not rank.pending and len(rank.outer) == len(self.means)
            assert as_others or not self.faults.even, f"rank {number} has not ended as the others"


class Rank:
    """One rank's process.

    Attributes:
        outer: the outer steps that it has.
        learned: its own steps.
        pending: those of them that no outer step has counted, as far as it knows.
        stopped_until: when it goes on, seconds.
        done: whether it has made its last averaging.
    """

    def __init__(self, world, number):
        self.number = number
        self.outer = []
        self.learned = set()
        self.pending = set()
        self.stopped_until = 0.0
        self.done = False
        self._world = world
        chance, faults = world.chance, world.faults
        self._pace_s = 5.0 if faults.even else chance.choice([1.0, 1.0, 2.5, 6.0])
        self._program = None
        self._attempting = None
        self._known = math.inf if faults.loaded else 0.0

    @property
    def rests(self):
        """Whether it is done, or stopped for ever."""
        return self.done or self.stopped_until == math.inf

    def start(self):
        """Begin to train."""
        self._program = self._train()
        self._plan_stops()
        self._resume(None)

    def _plan_stops(self):
        world, faults = self._world, self._world.faults
        chance = world.chance
        if faults.even:
            if self.number == 3:
                begin = chance.uniform(0.0, 5.2 * faults.periods)
                if chance.random() < 0.6:  # amid an averaging
                    begin = 5.0 * chance.randint(1, 2) + chance.uniform(-0.05, 0.2)
                world.at(begin, None, lambda: self._stop(chance.uniform(0.1, 12.0)))
            return
        for period in range(faults.periods + 1):
            if chance.random() < faults.stops:
                begin = chance.uniform(period, period + 2) * self._pace_s
                world.at(begin, None, lambda: self._stop(chance.choice([0.2, 1.0, 5.0, 15.0])))
        if faults.dies == self.number:
            world.at(chance.uniform(0.0, 10.0), None, lambda: self._stop(math.inf))

    def _stop(self, seconds):
        self.stopped_until = max(self.stopped_until, self._world.clock.now + seconds)
        self._world.at(
            self._world.clock.now + self._world.faults.patience_s, None, self._look_for_silence
        )

    def _look_for_silence(self):
        if self.stopped_until > self._world.clock.now and self._attempting is not None:
            self._attempting.silent(self)

    def _resume(self, value):
        assert self._program is not None
        try:
            request = self._program.send(value)
        except StopIteration:
            self.done = True
            return
        request(self._resume)

    def _sleep(self, seconds):
        return lambda resume: self._world.at(
            self._world.clock.now + seconds, self, lambda: resume(None)
        )

    def _ask(self, expected, desired):
        """Have the store compare and set; nothing is changed if both are the same."""

        def ask(resume):
            def arrive():
                text = self._world.compare_set(expected, desired)
                self._world.later(0.01, self, lambda: resume(text))

            self._world.later(0.01, None, arrive)

        return ask

    def _train(self):
        world = self._world
        spread = 0.001 if world.faults.even else 0.2
        for period in range(world.faults.periods + 1):
            yield self._sleep(self._pace_s * world.chance.uniform(1 - spread, 1 + spread))
            self.learned.add((self.number, period))
            self.pending.add((self.number, period))
            yield from self._average(last=period == world.faults.periods)

    def _average(self, *, last):
        world, faults = self._world, self._world.faults
        contribution = frozenset(self.pending)
        began, stopped_before = world.clock.now, self.stopped_until
        turn = Participant(
            self.number,
            Rules(faults.ranks, faults.least, faults.grace_s, faults.timeout_s),
            Arrival(len(self.outer), len(contribution)),
            TERMS,
            known=self._known,
            last=last,
        )
        text = yield self._ask("", "")
        told = None
        while True:
            attempting = self._attempting
            if attempting is not None and attempting is not told:
                if self.number in attempting.results:
                    turn.complete()
                    told = attempting
                elif self.number in attempting.errors:
                    turn.fail(attempting.errors[self.number])
                    told = attempting
            action = turn.look(Register.parse(text), world.clock.now)
            match action:
                case Propose(register):
                    text = yield self._ask(text, register.dump())
                case Attempt():
                    self._leave()
                    self._attempting = world.attempts.setdefault(
                        action.number, Attempting(world, action)
                    )
                    self._attempting.join(self, (contribution, action.weight))
                    text = yield self._ask("", "")
                case End(outcome):
                    ended = self._attempting
                    self._leave()
                    self._settle(outcome, contribution, ended)
                    world.outcome[outcome.name.lower().replace("_", " ")] += 1
                    took_s = world.clock.now - began
                    others = self.number != 3 and self.stopped_until == stopped_before
                    # Those that have come wait for each other for a moment: they are equally
                    # fast. After a pause the late rank may come first: it waits for the others.
                    in_time = took_s <= 1.1 * faults.grace_s + 0.3 or not faults.even or last
                    assert in_time or not others, f"rank {self.number} has waited {took_s:.2f} s"
                    return outcome
                case _:
                    yield self._sleep(LOOK_S)
                    text = yield self._ask("", "")

    def _leave(self):
        if self._attempting is not None:
            self._attempting.leave(self)
        self._attempting = None

    def _settle(self, outcome, contribution, ended):
        if outcome is Outcome.AVERAGED:
            assert ended is not None
            outer, mean = ended.results[self.number]
            if outer is not None and len(self.outer) < ended.asked.steps:
                self.outer = list(outer)
            step = ended.asked.steps
            assert len(self.outer) == step, f"rank {self.number} makes outer step {step} early"
            self._world.note_mean(len(self.outer), mean)
            self.outer.append(mean)
        if outcome in {Outcome.AVERAGED, Outcome.COUNTED}:
            self.pending -= contribution
        if outcome is Outcome.AVERAGED:
            self._known = len(self.outer)
        elif outcome in {Outcome.COUNTED, Outcome.LEFT_OUT}:
            self._known = math.inf


@dataclass
class Attempting:
    """An attempt, as reducers see it, and what each member has of it.

    Attributes:
        asked: what it is.
        results: by rank that has it: the source's outer steps, if it was asked for them; the mean.
        errors: by rank, whom its error blames.
    """

    world: World
    asked: Attempt
    results: dict[int, tuple[list[Mean] | None, Mean]] = field(default_factory=dict)
    errors: dict[int, frozenset[int]] = field(default_factory=dict)
    _here: dict[int, Rank] = field(default_factory=dict)
    _sent: Mean = field(default_factory=dict)
    _outer: list[Mean] | None = None
    _over: bool = False
    _blamed: frozenset[int] | None = None

    def join(self, rank, contribution):
        """Have a member contribute."""
        world = self.world
        assert rank.number in self.asked.members, f"rank {rank.number} makes an attempt of others"
        self._here[rank.number] = rank
        if self._blamed is not None:
            world.later(0.02, rank, lambda: self._fail(rank.number, self._blamed))
        slow = 0.02 * world.faults.grace_s if world.faults.even else world.chance.random()
        world.later(slow, rank, lambda: self._contribute(rank, contribution))
        world.at(world.clock.now + world.faults.grace_s, rank, lambda: self._time_out(rank))
        if world.chance.random() < world.faults.hostile:
            blamed = [one for one in self.asked.members if world.chance.random() < 0.3]
            world.later(1.5, rank, lambda: self._fail(rank.number, frozenset(blamed)))

    def leave(self, rank):
        """Let a member go: the others cannot end if it has not contributed."""
        self._here.pop(rank.number, None)
        if rank.number not in self._sent:
            self._blame({rank.number})

    def silent(self, rank):
        """Give up a member that is stopped: what is on the way to it is gone, too."""
        self._fail(rank.number, frozenset())
        if rank.number not in self._sent:
            self._blame({rank.number})

    def _contribute(self, rank, contribution):
        if self._here.get(rank.number) is not rank or rank.number in self.errors:
            return
        self._sent[rank.number] = contribution
        if rank.number == self.asked.source:
            self._outer = list(rank.outer)
        if len(self._sent) == len(self.asked.members) and not self._over:
            self._over = True
            slow = 0.005 if self.world.faults.even else 0.5
            for member in self._here.values():
                self.world.later(slow, member, lambda to=member: self._deliver(to.number))

    def _deliver(self, rank):
        if rank not in self.errors:
            self.results[rank] = self._outer, dict(self._sent)

    def _time_out(self, rank):
        if rank.number in self._here and rank.number not in self.results:
            missing = frozenset(self.asked.members) - self._sent.keys()
            self._fail(rank.number, missing)
            self._blame(missing)

    def _blame(self, ranks):
        """Tell all members that these cannot contribute, unless all have."""
        if not self._over:
            self._over = True
            self._blamed = frozenset(ranks)
            for rank in list(self._here):
                self.world.later(0.02, None, lambda to=rank: self._fail(to, frozenset(ranks)))

    def _fail(self, rank, blamed):
        if rank not in self.results:
            self.errors.setdefault(rank, blamed)
