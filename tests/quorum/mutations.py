"""Rules of the decision, each broken on purpose: a seed shows it."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.quorum.world import World
from worker_client.outer.quorum import (
    UNKNOWN,
    End,
    Outcome,
    Participant,
    Register,
)

look, waiting = Participant.look, Participant._waiting
begin, in_attempt = Participant._begin, Participant._in_attempt
arrive, without, decide = Register.arrive, Register.without, Register.decide


def _at_once(self, register):
    """Take a result for the outer step before the register says so (4)."""
    if self._complete:
        return End(Outcome.AVERAGED)
    return in_attempt(self, register)


def _same_number(self, ranks, least):
    """Let the remaining ranks go on with a void attempt (5)."""
    left = without(self, ranks, least)
    return replace(left, attempt=self.attempt) if left.members else left


def _late_stays(self, ranks, least):
    """Make another attempt with the same ranks (5)."""
    del ranks
    return without(self, (), least)


def _uncounted(self):
    """Do not say whose contribution an outer step has (4)."""
    return replace(decide(self), counted=self.counted)


def _nobody_behind(self, register):
    """Bring nobody up to date (3)."""
    return begin(self, register)._replace(source=None)


def _any_source(self, register):
    """Take the lowest member's outer parameters, though it may be behind (3)."""
    found = begin(self, register)
    return found if found.source is None else found._replace(source=found.members[0])


def _all_alike(self, register):
    """Let all contributions count alike (3)."""
    return begin(self, register)._replace(weight=1.0)


def _enough_are_enough(self, least):
    """Begin also when nobody has all outer steps (3)."""
    return len(self.arrived) >= least


def _fewer_suffice(self, least):
    """Begin with one rank less than is needed (3)."""
    return len(self.arrived) >= max(1, least - 1) and bool(self.fresh)


def _left_out_as_counted(self, register, now):
    """Take every rank that made the latest attempt for one that was counted (5)."""
    found = look(self, register, now)
    if isinstance(found, End) and found.outcome is Outcome.LEFT_OUT and self._attempt:
        return End(Outcome.COUNTED)
    return found


def _some_know(self, register, now):
    """Begin with loaded states before all ranks have said how many outer steps they have (3)."""
    if register.steps == UNKNOWN and self._rank in register.arrived:
        steps = max(one.steps for one in register.arrived.values())
        return look(self, replace(register, steps=steps), now)
    return look(self, register, now)


def _forever(self, register, now):
    """Wait for all ranks, however long that takes (3)."""
    self._since = now
    return waiting(self, register, now)


def _never_give_up(self, late):
    """Do not say who was late: the attempt goes on (5)."""
    del self, late


def _join_the_last(self, rank, arrival, terms, *, last):
    """Let ranks that train on wait together with ranks at their last averaging (2)."""
    both = replace(self, last=last) if self.arrived else self
    return arrive(both, rank, arrival, terms, last=last)


class Mutation(NamedTuple):
    """A rule that is broken.

    Attributes:
        where: its class.
        name: of the method.
        by: what stands in its place.
        seed: one that notices.
    """

    where: type
    name: str
    by: Callable[..., Any]
    seed: int


MUTATIONS = {
    "taken-before-decided": Mutation(Participant, "_in_attempt", _at_once, 0),
    "void-attempt-goes-on": Mutation(Register, "without", _same_number, 0),
    "late-rank-stays": Mutation(Register, "without", _late_stays, 2),
    "counted-untold": Mutation(Register, "decide", _uncounted, 4),
    "nobody-behind": Mutation(Participant, "_begin", _nobody_behind, 0),
    "any-source": Mutation(Participant, "_begin", _any_source, 0),
    "unweighted": Mutation(Participant, "_begin", _all_alike, 0),
    "nobody-up-to-date": Mutation(Register, "suffices", _enough_are_enough, 2),
    "fewer-suffice": Mutation(Register, "suffices", _fewer_suffice, 1),
    "left-out-as-counted": Mutation(Participant, "look", _left_out_as_counted, 0),
    "some-know": Mutation(Participant, "look", _some_know, 40),
    "no-grace-ends": Mutation(Participant, "_waiting", _forever, 7),
    "lateness-untold": Mutation(Participant, "fail", _never_give_up, 0),
    "last-with-others": Mutation(Register, "arrive", _join_the_last, 7),
}


@contextmanager
def broken(name):
    """Break a rule for as long as this lasts."""
    mutation = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutation.where, mutation.name, mutation.by)
        yield


def first_caught(name, seeds):
    """Return the first seed that notices a mutation, and how; None if none does."""
    with broken(name):
        return next(((seed, story) for seed in seeds if (story := run(World(seed)))), None)


def run(world):
    """Run a world; return what has gone wrong, if something did."""
    try:
        world.run()
    except (AssertionError, LookupError) as error:
        return f"{type(error).__name__}: {error}"[:150]
    return ""
