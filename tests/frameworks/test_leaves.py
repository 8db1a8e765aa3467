"""Trainings with leaves by frameworks: the weights of the plain loop, for any number of ranks."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")


def weights(servers, ranks, section):
    """What the ranks of a training end with that a section of docs/leaves.md shows."""
    given = environments(ranks, servers, TQDM_DISABLE="1")
    command = ("-m", "tests.frameworks.leaves_cases", section)
    return {rank["weights"] for rank in run(given, *command)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("section", ["Lightning", "Accelerate"])
def test_the_weights_are_those_of_the_loop_for_any_number_of_ranks(servers, section):
    pytest.importorskip(section.lower(), reason=f"needs {section.lower()}")
    expected = weights(servers, 1, "A loop")
    assert len(expected) == 1
    for ranks in (1, 2, 3):
        assert weights(servers, ranks, section) == expected, ranks
