"""Seeds of the simulator, and what it notices; more: ``python -m tests.sim``."""

import logging

import pytest

from tests.sim import mutations
from tests.sim.runner import implementation_of, run
from tests.sim.world import World

SEEDS = 25
MORE_SEEDS = 2000
BATCH = 25
ENOUGH = 200  # one of so many seeds notices a broken rule


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def check(first):
    for seed in range(first, first + BATCH):
        _, _, story = run(seed)
        assert not story, f"seed {seed}: {story}"


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_the_guarantee_holds_whatever_happens(first):
    check(first)


@pytest.mark.extended("test_the_guarantee_holds_whatever")
@pytest.mark.parametrize("first", range(SEEDS, MORE_SEEDS, BATCH))
def test_the_guarantee_holds_in_many_more_worlds(first):
    check(first)


def test_a_seed_replays_to_the_byte():
    one, other = (World(11, implementation_of(11)) for _ in range(2))
    assert one.run() == other.run()
    assert one.outcome.events > 0
    assert one.trace == other.trace


@pytest.mark.extended_cases(
    "no-epoch-check",
    "window-before-order",
    "rank-lost-at-once",
    "questions-not-declined",
    "failures-untold",
)
@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_a_broken_rule_is_noticed(name):
    seeds = mutations.MUTATIONS[name].seed, *range(ENOUGH)
    caught = mutations.first_caught(name, seeds, lambda seed: run(seed, "plain")[2])
    assert caught is not None
    assert not run(caught[0], "plain")[2], "it is the rule that was noticed"
