"""Ranks decide on outer steps while some are stopped, slow or cut off: by seeds, by rules."""

import math

import pytest

from tests.quorum.mutations import MUTATIONS
from tests.quorum.world import World
from tests.sim.rules import check, check_notices
from worker_client.outer.quorum import (
    Arrival,
    Attempt,
    End,
    Outcome,
    Participant,
    Propose,
    Register,
    Rules,
    Wait,
)

BATCH = 50
TERMS = (0.7, 0.9)
RULES = Rules(world_size=3, least=2, grace_s=5.0, timeout_s=20.0)


def participant(rank, steps=0, known=0.0, **more):
    arrival = Arrival(steps, 10.0 * (rank + 1))
    return Participant(rank, RULES, arrival, TERMS, known=known, **more)


@pytest.mark.parametrize("first", [0])
def test_all_ranks_have_the_same_outer_steps(first):
    check(World, range(first, first + BATCH))


@pytest.mark.extended("test_all_ranks_have_the_same_outer_steps")
@pytest.mark.parametrize("first", range(BATCH, 1000, BATCH))
def test_in_many_more_trainings_as_well(first):
    check(World, range(first, first + BATCH))


@pytest.mark.extended_cases("void-attempt-goes-on", "late-rank-stays")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name):
    check_notices(World, MUTATIONS, name)


def test_a_register_is_the_text_that_it_was_made_of():
    register = Register(
        2, {3: Arrival(2, 1.5), 11: Arrival(1, 7.0)}, True, TERMS, 4, (3, 11), {3: 4, 11: 2}
    )
    assert Register.parse(register.dump()) == register
    assert Register.parse(Register().dump()).dump() == Register().dump()


def test_one_averaging_of_three_ranks_of_which_one_is_late():
    register = Register()
    first, second, third = (participant(rank) for rank in range(3))
    for one in (first, second):
        action = one.look(register, 100.0)
        assert isinstance(action, Propose)
        register = action.register
    assert first.look(register, 101.0) == Wait()
    assert first.look(register, 105.9) == Wait(), "its grace is from when it saw enough of them"
    action = first.look(register, 106.0)
    assert isinstance(action, Propose)
    register = action.register
    assert first.look(register, 106.0) == Attempt(1, (0, 1), 2 / 3, None, 0, 30.0)
    assert second.look(register, 106.0) == Attempt(1, (0, 1), 4 / 3, None, 0, 30.0)
    assert third.look(register, 106.1) == End(Outcome.LEFT_OUT)
    second.complete()
    action = second.look(register, 106.2)
    assert isinstance(action, Propose)
    register = action.register
    assert (register.steps, register.counted) == (1, {0: 1, 1: 1})
    assert first.look(register, 106.3) == Wait(), "its result is on the way"
    first.complete()
    assert first.look(register, 106.4) == second.look(register, 106.4) == End(Outcome.AVERAGED)


@pytest.mark.parametrize(("blamed", "outcome"), [((2,), Outcome.LEFT_OUT), ((), Outcome.FAILED)])
def test_a_rank_that_hears_first_that_it_is_late_has_no_error(blamed, outcome):
    late = participant(2)
    register = Register(0, {rank: Arrival(0, 10.0) for rank in range(3)}, False, TERMS, 0).begin()
    assert isinstance(late.look(register, 0.0), Attempt)
    late.fail(blamed)  # the others, who are to say so as well, have not been as quick
    action = late.look(register, 9.0)
    assert isinstance(action, Propose)
    assert action.register.members == (0, 1)
    assert late.look(action.register, 9.1) == End(outcome)


def test_a_rank_that_was_late_waits_next_time():
    register = Register(steps=2, counted={0: 2, 1: 2})
    assert participant(2, steps=1, known=1.0).look(register, 0.0) == End(Outcome.LEFT_OUT)
    action = participant(2, steps=1, known=math.inf).look(register, 0.0)
    assert isinstance(action, Propose)
    assert action.register.arrived == {2: Arrival(1, 30.0)}
    assert not action.register.suffices(1), "it cannot bring anybody up to date"


def test_a_rank_that_did_not_leave_an_earlier_averaging_says_anew_what_it_brings():
    register = Register(1, {2: Arrival(1, 10.0)}, terms=TERMS)
    action = participant(2, steps=1).look(register, 0.0)
    assert isinstance(action, Propose)
    assert action.register.arrived == {2: Arrival(1, 30.0)}
