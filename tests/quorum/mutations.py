"""Rules of the decision, each broken on purpose: a seed shows it."""

from dataclasses import replace

from tests.quorum.world import World
from tests.sim.rules import Mutations
from worker_client.outer.quorum import UNKNOWN, End, Outcome, Participant, Register

MUTATIONS = Mutations(World)
broken = MUTATIONS.broken


@MUTATIONS.instead_of(Participant, "_in_attempt")
def taken_before_decided(in_attempt, self, register):
    """Take a result for the outer step before the register says so (4)."""
    if self._complete:
        return End(Outcome.AVERAGED)
    return in_attempt(self, register)


@MUTATIONS.instead_of(Register, "without")
def void_attempt_goes_on(without, self, ranks, least):
    """Let the remaining ranks go on with a void attempt (5)."""
    left = without(self, ranks, least)
    return replace(left, attempt=self.attempt) if left.members else left


@MUTATIONS.instead_of(Register, "without")
def late_rank_stays(without, self, ranks, least):
    """Make another attempt with the same ranks (5)."""
    return without(self, (), least)


@MUTATIONS.instead_of(Register, "decide")
def counted_untold(decide, self):
    """Do not say whose contribution an outer step has (4)."""
    return replace(decide(self), counted=self.counted)


@MUTATIONS.instead_of(Participant, "_begin")
def nobody_behind(begin, self, register):
    """Bring nobody up to date (3)."""
    return begin(self, register)._replace(source=None)


@MUTATIONS.instead_of(Participant, "_begin")
def any_source(begin, self, register):
    """Take the lowest member's outer parameters, though it may be behind (3)."""
    found = begin(self, register)
    return found if found.source is None else found._replace(source=found.members[0])


@MUTATIONS.instead_of(Participant, "_begin")
def unweighted(begin, self, register):
    """Let all contributions count alike (3)."""
    return begin(self, register)._replace(weight=1.0)


@MUTATIONS.instead_of(Register, "suffices")
def nobody_up_to_date(_, self, least):
    """Begin also when nobody has all outer steps (3)."""
    return len(self.arrived) >= least


@MUTATIONS.instead_of(Register, "suffices")
def fewer_suffice(_, self, least):
    """Begin with one rank less than is needed (3)."""
    return len(self.arrived) >= max(1, least - 1) and bool(self.fresh)


@MUTATIONS.instead_of(Participant, "look")
def left_out_as_counted(look, self, register, now):
    """Take every rank that made the latest attempt for one that was counted (5)."""
    found = look(self, register, now)
    if isinstance(found, End) and found.outcome is Outcome.LEFT_OUT and self._attempt:
        return End(Outcome.COUNTED)
    return found


@MUTATIONS.instead_of(Participant, "look")
def some_know(look, self, register, now):
    """Begin with loaded states before all ranks have said how many outer steps they have (3)."""
    if register.steps == UNKNOWN and self._rank in register.arrived:
        steps = max(one.steps for one in register.arrived.values())
        return look(self, replace(register, steps=steps), now)
    return look(self, register, now)


@MUTATIONS.instead_of(Participant, "_waiting")
def no_grace_ends(waiting, self, register, now):
    """Wait for all ranks, however long that takes (3)."""
    self._since = now
    return waiting(self, register, now)


@MUTATIONS.instead_of(Participant, "fail")
def lateness_untold(_, self, late):
    """Do not say who was late: the attempt goes on (5)."""


@MUTATIONS.instead_of(Register, "arrive")
def last_with_others(arrive, self, rank, arrival, terms, *, last):
    """Let ranks that train on wait together with ranks at their last averaging (2)."""
    both = replace(self, last=last) if self.arrived else self
    return arrive(both, rank, arrival, terms, last=last)
