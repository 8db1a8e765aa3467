"""Residuals outlive the processes, and the reducers, that they come from: no bit differs."""

import pytest

from tests.conftest import local_pool
from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")

STEPS = 10
LAYERS = [f"layers.{at}.weight" for at in range(6)]


def train(servers, folder, *steps):
    rank = ("-m", "tests.integration.checkpointed_ddp", str(folder), *map(str, steps))
    return run(environments(2, servers, REDUCTION_WIRE_DTYPE="int8"), *rank)


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    return train(pool, tmp_path_factory.mktemp("undisturbed"), 0, STEPS)


def bits(ranks):
    """Weights and residuals of every rank."""
    return [(rank["digest"], rank["residuals"]) for rank in ranks]


def test_each_large_parameter_has_residuals(undisturbed):
    first, second = undisturbed
    assert sorted(first["residuals"]) == LAYERS
    assert first["digest"] == second["digest"]
    assert all(first["residuals"][name] != second["residuals"][name] for name in LAYERS)
    assert first["rearranged"], "the next test is one of other buckets"


def test_a_training_from_a_checkpoint_has_the_bits_of_an_undisturbed_one(
    pool, tmp_path, undisturbed
):
    train(pool, tmp_path, 0, STEPS // 2)
    assert bits(train(pool, tmp_path, STEPS // 2, STEPS)) == bits(undisturbed)


def test_a_training_that_loses_a_reducer_has_the_bits_of_an_undisturbed_one(
    tmp_path, undisturbed, monkeypatch
):
    with local_pool(1) as lasting:
        monkeypatch.setenv("REDUCTION_FAILPOINTS", "reducer.between_results=kill@25")
        with local_pool(1) as mortal:
            monkeypatch.delenv("REDUCTION_FAILPOINTS")
            ranks = train([*lasting, *mortal], tmp_path, 0, STEPS)
    assert [rank["losses"] for rank in ranks] == [1, 1]
    assert bits(ranks) == bits(undisturbed)


def test_a_training_that_makes_a_failed_step_again_has_the_bits_of_an_undisturbed_one(
    pool, tmp_path, undisturbed
):
    ranks = train(pool, tmp_path, 0, STEPS, STEPS // 2)
    assert all("disagree on" in rank["failure"] for rank in ranks)
    assert bits(ranks) == bits(undisturbed)
