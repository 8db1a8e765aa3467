"""Real DDP, real processes: 16 or 8 bits on the wire, residuals, unequal batches."""

import pytest

from tests.conftest import local_pool
from tests.ranks import case_names, environments, run
from torture.failpoints import REDUCER_LOOP, has_failpoints

torch = pytest.importorskip("torch", reason="needs torch")

MODULE = "tests.integration.wire_ddp"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    scope="module",
    params=[
        *[(wire, "host") for wire in ("bf16", "fp16", "int8")],
        ("int8", "slow"),
        *[
            pytest.param(case, marks=pytest.mark.extended)
            for case in (("fp8_e4m3", "host"), ("bf16", "slow"))
        ],
        *[pytest.param((wire, "cuda"), marks=on_a_gpu) for wire in ("bf16", "int8", "fp8_e4m3")],
    ],
    ids="-".join,
)
def compressed(request, pool):
    """What went wrong with each case at both ranks."""
    wire, kind = request.param
    given = environments(2, pool, REDUCTION_WIRE_DTYPE=wire)
    return run(given, "-m", MODULE, "case_", kind)


@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(compressed, case):
    assert [rank[case] for rank in compressed] == ["", ""]


@pytest.mark.parametrize(
    ("ranks", "wire", "cases"),
    [
        (3, "none", "unequal_"),
        (2, "int8", "weighted_"),
        (2, "int8", "residuals_"),
        pytest.param(2, "bf16", "weighted_", marks=pytest.mark.extended("test_cases[2-int8-weigh")),
    ],
)
def test_cases(pool, ranks, wire, cases):
    given = environments(ranks, pool, REDUCTION_WIRE_DTYPE=wire)
    for rank in run(given, "-m", MODULE, cases, "host"):
        assert set(rank.values()) == {""}


@pytest.mark.skipif(not has_failpoints(REDUCER_LOOP), reason="a wheel has no failpoints")
def test_a_training_that_loses_a_reducer_has_the_bits_of_an_undisturbed_one():
    with local_pool(1) as lasting, local_pool(1, "reducer.between_results=kill@25") as mortal:
        given = environments(2, [*lasting, *mortal], REDUCTION_WIRE_DTYPE="int8")
        for rank in run(given, "-m", MODULE, "reducer_", "host"):
            assert set(rank.values()) == {""}
