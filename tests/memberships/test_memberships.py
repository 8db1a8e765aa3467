"""Ranks are lost and join in memory, many times over: all that are left have the same results."""

import pytest

from tests.memberships.mutations import MUTATIONS
from tests.memberships.training import Training
from tests.sim.rules import check, check_notices


@pytest.mark.parametrize("seeds", [range(12)])
def test_all_that_are_left_have_the_same_results(seeds):
    check(Training, seeds)


@pytest.mark.extended("test_all_that_are_left_have_the_same_results")
@pytest.mark.parametrize("first", range(12, 612, 60))
def test_in_many_more_trainings_as_well(first):
    check(Training, range(first, first + 60))


def test_a_seed_replays():
    one, other = Training(3), Training(3)
    one.run()
    other.run()
    assert one.results == other.results
    assert one.clock.now == other.clock.now


@pytest.mark.extended_cases("newcomers-met-at-once")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name):
    check_notices(Training, MUTATIONS, name)
