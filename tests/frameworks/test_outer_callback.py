"""The callback of transformers' Trainer: two sites that train by themselves and end alike."""

import pytest
import torch

from tests.frameworks.training import unlaunched
from tests.ranks import environments, run

for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason=f"needs {package}")


@pytest.fixture(scope="module")
def sites(servers, tmp_path_factory):
    """What each of the two sites has come to, by the names of its trainings."""
    given = [
        {**unlaunched(one), "SITE": one["RANK"]}
        for one in environments(2, servers, REDUCTION_TIMEOUT="60s")
    ]
    return run(given, "-m", "tests.frameworks.outer_cases", tmp_path_factory.mktemp("sites"))


def weights(sites, training):
    return [torch.tensor(site[training]["weights"]) for site in sites]


def test_an_averaging_at_the_end_is_the_mean_of_sites_that_trained_alone(sites):
    one, other = weights(sites, "alone")
    assert not torch.equal(one, other)
    for mean in weights(sites, "mean"):
        torch.testing.assert_close(mean, (one + other) / 2)
    assert [site["mean"]["sent"] for site in sites] == pytest.approx([1, 1], abs=0.1)


def test_sites_average_after_so_many_steps_and_end_alike(sites):
    one, other = weights(sites, "whole")
    assert torch.equal(one, other)
    # After 3 and 6 of the 8 steps, and at the end.
    assert [site["whole"]["sent"] for site in sites] == pytest.approx([3, 3], abs=0.1)


def test_a_checkpoint_has_all_that_the_sites_go_on_from(sites):
    for resumed, whole in zip(weights(sites, "resumed"), weights(sites, "whole"), strict=True):
        assert torch.equal(resumed, whole)


def test_a_best_model_is_refused(sites):
    assert all("leave out load_best_model_at_end" in site["refused"] for site in sites)
