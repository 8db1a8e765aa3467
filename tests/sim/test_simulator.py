"""Seeds of the simulator, and what it notices; more: ``python -m tests.sim``."""

import logging

import pytest

from tests.sim.mutations import MUTATIONS
from tests.sim.rules import check, check_notices
from tests.sim.world import GaveUpError, World

SEEDS = 25
MORE_SEEDS = 2000
BATCH = 25


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_the_guarantee_holds_whatever_happens(first):
    check(World, range(first, first + BATCH))


@pytest.mark.extended("test_the_guarantee_holds_whatever")
@pytest.mark.parametrize("first", range(SEEDS, MORE_SEEDS, BATCH))
def test_the_guarantee_holds_in_many_more_worlds(first):
    check(World, range(first, first + BATCH), GaveUpError)


def test_a_seed_replays_to_the_byte():
    one, other = World(11), World(11)
    assert one.run() == other.run()
    assert one.outcome["events"] > 0
    assert one.trace == other.trace


@pytest.mark.extended_cases(
    "no-epoch-check",
    "window-before-order",
    "rank-lost-at-once",
    "questions-not-declined",
    "failures-untold",
    "another-process-lost",
)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name):
    check_notices(World, MUTATIONS, name)
