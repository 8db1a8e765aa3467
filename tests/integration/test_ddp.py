"""Real DDP, real processes: every option against Gloo, errors that leave the model usable."""

from contextlib import nullcontext

import pytest

from tests.conftest import local_pool
from tests.ranks import case_names, environments, run

pytest.importorskip("torch", reason="needs torch")

MODULE = "tests.integration.ddp_cases"


@pytest.fixture(scope="module")
def went(pool):
    """What went wrong with each case at both ranks."""
    return run(environments(2, pool), "-m", MODULE, "case_")


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(went, case):
    assert [rank.get(case, "not reached") for rank in went] == ["", ""]


@pytest.mark.extended_cases("3")
@pytest.mark.parametrize("reducers", [0, 3])
def test_three_ranks_in_fp32(reducers):
    # Without servers every rank hosts a reducer: the embedded default.
    with local_pool(reducers) if reducers else nullcontext([]) as servers:
        for rank in run(environments(3, servers), "-m", MODULE, "three_"):
            assert set(rank.values()) == {""}
