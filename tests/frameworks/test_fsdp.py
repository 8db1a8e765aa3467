"""FSDP with replicas: the example at other numbers of ranks, and what is refused."""

import pytest

from tests.frameworks.training import assert_alike, train
from tests.ranks import case_names, environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sklearn", reason="needs scikit-learn")

MODULE = "tests.frameworks.fsdp_cases"


@pytest.mark.timeout(300)
def test_two_shards_of_two_replicas(servers):
    ours = train("fsdp_digits.py", servers=servers, workers=4)
    assert_alike(ours, train("fsdp_digits.py", "--stock", workers=4))
    # Every rank sends its shard of the gradients, and no more but for what pads it.
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert sum(end.bytes_reduced for end in ours) == pytest.approx(
        2 * 4 * parameters * 100, rel=0.02
    )


@pytest.mark.timeout(300)
def test_without_servers_the_replicas_host_reducers():
    assert len({end.weights for end in train("fsdp_digits.py", workers=4)}) == 1


@pytest.fixture(scope="module")
def went(servers):
    """What went wrong with each case at both ranks."""
    return run(environments(2, servers), "-m", MODULE)


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(went, case):
    assert [rank[case] for rank in went] == ["", ""]
