"""Ranks are lost and join in memory, many times over: all that are left have the same results."""

import pytest

from tests.memberships.mutations import MUTATIONS, broken
from tests.memberships.training import Training


@pytest.mark.parametrize("seeds", [range(12)])
def test_all_that_are_left_have_the_same_results(seeds):
    for seed in seeds:
        Training(seed).run()


@pytest.mark.extended("test_all_that_are_left_have_the_same_results")
@pytest.mark.parametrize("first", range(12, 612, 60))
def test_in_many_more_trainings_as_well(first):
    for seed in range(first, first + 60):
        Training(seed).run()


@pytest.mark.extended("test_all_that_are_left_have_the_same_results")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name):
    def train():
        for seed in range(200):
            Training(seed).run(most_s=3.0)

    with broken(name), pytest.raises(AssertionError):
        train()
