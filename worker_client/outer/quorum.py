"""Who takes part in an averaging when not all ranks need to: the decision, without I/O.

The ranks share one register for each fragment, text in a store that changes by compare-and-set
alone: whatever it says is decided, and the same for all. A `Participant` is one rank's part in one
averaging. It is shown the register, again and again, and says what to do next: to propose another
value, to make an attempt, to wait, or that it has ended. docs/architecture/quorum.md is the
specification; numbers in parentheses are its rules.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


UNKNOWN = -1  # outer steps, where ranks have loaded states, until all have said theirs


class Rules(NamedTuple):
    """How averagings are decided, the same at all ranks."""

    world_size: int
    least: int  # ranks that an averaging needs
    grace_s: float  # for which these wait for others, by the clock that `look` is given
    timeout_s: float  # for which a rank waits for so many; and the last averaging, for all


class Arrival(NamedTuple):
    """What a rank says that waits for the next outer step."""

    steps: int  # outer steps that it has
    tokens: float  # what its contribution is of, its weight in the mean


@dataclass(frozen=True)
class Register:
    """What the ranks have decided of one fragment."""

    steps: int = 0  # that are decided; UNKNOWN where ranks go on from states that were loaded
    arrived: Mapping[int, Arrival] = field(default_factory=dict)  # who waits for the next one
    last: bool = False  # whether that is their last averaging, of `OuterOptimizer.finish`
    terms: tuple[float, ...] = ()  # that they have in common: learning rate and momentum
    attempt: int = 0  # number of the latest, from 1
    members: tuple[int, ...] = ()  # who makes it, while it is in progress
    # By rank, the latest attempt that has decided an outer step with its contribution.
    counted: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Register:
        """Return what `dump` has made text of."""
        said = json.loads(text)
        said["arrived"] = {int(rank): Arrival(*one) for rank, one in said["arrived"].items()}
        said["counted"] = {int(rank): number for rank, number in said["counted"].items()}
        for name in ("terms", "members"):
            said[name] = tuple(said[name])
        return cls(**said)

    def dump(self) -> str:
        """Return it as text, the same for what is equal."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def fresh(self) -> list[int]:
        """The ranks that have arrived with all outer steps, ascending."""
        return sorted(rank for rank, one in self.arrived.items() if one.steps == self.steps)

    def weight(self, rank: int) -> float:
        """Return by how much a member's contribution counts, 1 in the mean over the members.

        It is 0 for all of them if none has learned anything.
        """
        total = self.tokens
        return len(self.members) * self.arrived[rank].tokens / total if total else 0.0

    @property
    def tokens(self) -> float:
        """What the contributions of the attempt in progress are of."""
        return math.fsum(self.arrived[one].tokens for one in self.members)

    def arrive(
        self, rank: int, arrival: Arrival, terms: tuple[float, ...], *, last: bool
    ) -> Register:
        """Have a rank wait for the next outer step (2)."""
        others = self.arrived if self.last == last else {}  # regular ones do not wait for the last
        return replace(self, arrived={**others, rank: arrival}, last=last, terms=terms)

    def begin(self) -> Register:
        """Have those that have arrived make an attempt (3)."""
        steps = self.steps
        if steps == UNKNOWN:
            steps = max(one.steps for one in self.arrived.values())
        members = tuple(sorted(self.arrived))
        return replace(self, steps=steps, attempt=self.attempt + 1, members=members)

    def decide(self) -> Register:
        """Let the attempt in progress be the outer step (4)."""
        counted = {**self.counted, **dict.fromkeys(self.members, self.attempt)}
        return replace(
            self, steps=self.steps + 1, arrived={}, last=False, members=(), counted=counted
        )

    def without(self, ranks: Collection[int], least: int) -> Register:
        """Leave ranks out; an attempt in progress is void, and the others make another one (5)."""
        arrived = {rank: one for rank, one in self.arrived.items() if rank not in ranks}
        left = replace(self, arrived=arrived, members=(), last=self.last and bool(arrived))
        return left.begin() if self.members and left.suffices(least) else left

    def suffices(self, least: int) -> bool:
        """Whether those that have arrived may make an attempt: one of them has all outer steps."""
        return len(self.arrived) >= least and bool(self.fresh)


class Outcome(Enum):
    """What has become of an averaging at one rank."""

    AVERAGED = auto()  # its contribution is in the mean, which it has
    COUNTED = auto()  # its contribution is in the mean, which never came
    LEFT_OUT = auto()  # the others have gone on without its contribution
    LATE = auto()  # too few others have come in time
    FAILED = auto()  # its own attempt has failed, which says nothing of the others


class Propose(NamedTuple):
    """Set the register to this, if it is still as it was shown; show what it is then."""

    register: Register


class Attempt(NamedTuple):
    """Give up an attempt that is in progress, and begin this one; show the register afterwards."""

    number: int
    members: tuple[int, ...]
    weight: float  # by how much this rank's contribution counts in the mean over them
    source: int | None  # the one that brings others up to date; None if all have all outer steps
    steps: int  # outer steps that are decided before this
    tokens: float  # what all contributions are of


class Wait(NamedTuple):
    """Show the register again soon, or when the attempt has ended."""


class End(NamedTuple):
    """It is over."""

    outcome: Outcome
    missing: tuple[int, ...] = ()  # ranks that had not come, if they were too few


class Participant:
    """One rank's part in one averaging of a fragment.

    Args:
        rank: in the job.
        rules: of the job.
        arrival: what the rank says.
        terms: what the ranks must have in common.
        known: outer steps that the rank knows of, or infinity if it waits whatever it finds: if
            more are decided when it comes it is late.
        last: whether this is the last averaging, of `OuterOptimizer.finish`.
    """

    def __init__(
        self,
        rank: int,
        rules: Rules,
        arrival: Arrival,
        terms: tuple[float, ...],
        *,
        known: float = math.inf,
        last: bool = False,
    ) -> None:
        self.arrival = arrival
        self.last = last
        self._rank = rank
        self._rules = rules._replace(grace_s=rules.timeout_s) if last else rules
        self._terms = terms
        self._known = math.inf if last else known
        self._came = math.inf  # when it first looked
        self._arrived = False
        self._waits_for: tuple[int, int] | None = None  # the outer step, and attempts before it
        self._since = math.inf  # when enough ranks had come for that
        # The attempt that the rank makes, 0 for none, and what has become of it here.
        self._attempt = 0
        self._complete = False
        self._late: frozenset[int] = frozenset()
        self._failed = False
        self._late_itself = False
        self._end: End | None = None  # once the register says that this rank is out

    def complete(self) -> None:
        """Record that the rank has the result of its attempt."""
        self._complete = True

    def fail(self, late: Collection[int]) -> None:
        """Record that the rank's attempt has failed.

        Args:
            late: members that are to blame; none if it is the rank's own failure.
        """
        self._late = frozenset(late) - {self._rank}
        self._failed = not self._late
        # It is stopped or slow, and hears from a reducer that the others wait for it no more.
        self._late_itself = self._failed and self._rank in late

    def look(self, register: Register, now: float) -> Propose | Attempt | Wait | End:
        """Say what to do, as the register is; `now` in seconds of a monotonic clock."""
        self._came = min(self._came, now)
        if self._attempt and register.counted.get(self._rank) == self._attempt:
            return self._decided()
        if self._attempt and register.members and register.attempt == self._attempt:
            return self._in_attempt(register)
        if self._rank in register.members:
            return self._begin(register)
        earlier = not self._arrived and register.arrived.get(self._rank) != self.arrival
        if self._rank in register.arrived and not earlier:  # else it never came to leave
            return self._waiting(register, now)
        if self._arrived:
            return self._end or End(Outcome.LEFT_OUT)
        return self._arrive(register, now)

    def _arrive(self, register: Register, now: float) -> Propose | Wait | End:
        """Arrive, if ranks may (2)."""
        # The last one waits for its turn; others go on, and come again.
        if self.last and register.members:
            return Wait() if now - self._came < self._rules.timeout_s else End(Outcome.LATE)
        late = register.steps > self._known and self._rank not in register.arrived
        if late or register.members or (register.last and not self.last):
            return End(Outcome.LEFT_OUT)
        self._check(register)
        return Propose(register.arrive(self._rank, self.arrival, self._terms, last=self.last))

    def _waiting(self, register: Register, now: float) -> Propose | Wait:
        """Begin when all are here, or enough for long enough (3); give up when it lasts (6)."""
        self._arrived = True
        all_here = len(register.arrived) == self._rules.world_size
        if all_here and register.steps == UNKNOWN:
            return Propose(register.begin())
        if not register.suffices(self._rules.least):
            self._waits_for = None
            if now - self._came < self._rules.timeout_s:
                return Wait()
            missing = tuple(sorted(set(range(self._rules.world_size)) - register.arrived.keys()))
            self._end = End(Outcome.LATE, missing)
            return Propose(register.without({self._rank}, self._rules.least))
        if self._waits_for != (register.steps, register.attempt):
            self._waits_for, self._since = (register.steps, register.attempt), now
            self._end = None  # it would have been out, and others have come first
        if all_here or now - self._since >= self._rules.grace_s:
            return Propose(register.begin())
        return Wait()

    def _begin(self, register: Register) -> Attempt:
        self._arrived = True
        self._attempt = register.attempt
        self._complete, self._late, self._failed, self._end = False, frozenset(), False, None
        behind = len(register.fresh) < len(register.members)
        source = register.fresh[0] if behind else None
        return Attempt(
            register.attempt,
            register.members,
            register.weight(self._rank),
            source,
            register.steps,
            register.tokens,
        )

    def _in_attempt(self, register: Register) -> Propose | Wait:
        """Decide with a result (4), and go on without who is late, or without itself (5)."""
        if self._complete:
            return Propose(register.decide())
        if self._failed:
            self._end = End(Outcome.LEFT_OUT if self._late_itself else Outcome.FAILED)
            return Propose(register.without({self._rank}, self._rules.least))
        if self._late:
            return Propose(register.without(self._late, self._rules.least))
        return Wait()

    def _decided(self) -> Wait | End:
        if self._complete:
            return End(Outcome.AVERAGED)
        return End(Outcome.COUNTED) if self._failed or self._late else Wait()

    def _check(self, register: Register) -> None:
        """Refuse to wait with ranks that this one does not go with (2)."""
        if UNKNOWN < register.steps < self.arrival.steps:
            raise MismatchError.between(
                "outer step",
                "steps",
                (min(register.counted, default=0), register.steps),
                (self._rank, self.arrival.steps),
                called="the outer steps that they have made (load the state of one checkpoint at "
                "all ranks)",
            )
        if register.arrived and self._terms != register.terms:
            raise MismatchError.between(
                "outer step",
                "terms",
                (min(register.arrived), register.terms),
                (self._rank, self._terms),
                called="the outer learning rate and momentum",
            )
