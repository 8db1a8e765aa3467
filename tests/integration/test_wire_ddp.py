"""Real DDP, real processes: 16 or 8 bits on the wire, error feedback, unequal batches."""

import pytest

from tests.ranks import environments, run

torch = pytest.importorskip("torch", reason="needs torch")

RANK = ("-m", "tests.integration.wire_ddp")
CASES = "stock,plain,feedback,default,wrapper,one_step,one_complex_step"
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
    wire, kind = request.param
    ends = run(environments(2, pool, REDUCTION_WIRE_DTYPE=wire), *RANK, CASES, kind)
    assert [end["staged"] for end in ends] == [kind != "host"] * 2
    return ends


@pytest.fixture(scope="module", params=[pytest.param("bf16", marks=pytest.mark.extended), "int8"])
def unequal(request, pool):
    given = environments(2, pool, REDUCTION_WIRE_DTYPE=request.param)
    return run(given, *RANK, "weighted")


@pytest.fixture(scope="module")
def weighted(pool):
    cases = "weighted,alone,join,alone-join,refused"
    return run(environments(3, pool), *RANK, cases)


@pytest.mark.extended_cases("bf16-host-plain", "fp16-host-plain")
@pytest.mark.parametrize("case", ["plain", "feedback", "default", "wrapper"])
def test_ranks_agree_to_the_bit(compressed, case):
    assert len({rank[case]["digest"] for rank in compressed}) == 1


def test_weighted_ranks_agree_to_the_bit(unequal):
    assert len({rank["weighted"]["digest"] for rank in unequal}) == 1


@pytest.mark.parametrize("case", ["plain", "feedback", "wrapper"])
def test_it_trains_nearly_like_gloo_in_float32(compressed, case):
    rank = compressed[0]
    assert rank[case]["loss"] == pytest.approx(rank["stock"]["loss"], rel=2e-3)
    assert rank[case]["loss"] != rank["stock"]["loss"]  # it was rounded indeed


def test_feedback_is_the_default_in_8_bits_alone(compressed):
    for rank in compressed:
        same = "feedback" if rank["wire_dtype"] in {"int8", "fp8_e4m3"} else "plain"
        assert rank["default"] == rank[same]


def test_a_gradient_travels_as_it_would_alone(compressed):
    for rank in compressed:
        assert rank["one_step"] == {
            "exact": ["0.bias", "2.weight", "2.bias", "4.weight", "4.bias"],
            "rounded": ["0.weight"],
            "neither": [],
        }


def test_a_complex_gradient_travels_as_its_real_numbers(compressed):
    for rank in compressed:
        assert rank["one_complex_step"] == {
            "exact": ["phase", "lift.bias"],
            "rounded": ["modes", "lift.weight"],
            "neither": [],
        }


def test_residuals_are_kept_for_each_parameter_that_is_rounded(compressed):
    for rank in compressed:
        assert rank["plain"]["residuals"] == []
        assert len(rank["feedback"]["residuals"]) == 2
        assert min(rank["feedback"]["residuals"]) > 0
        assert "2 parameters with residuals have no name" in rank["feedback"]["checkpoint"]
        assert rank["feedback"]["digest"] != rank["plain"]["digest"]


@pytest.mark.parametrize(("case", "same"), [("weighted", "alone"), ("join", "alone-join")])
def test_unequal_batches_train_like_one_process_with_all_samples(weighted, case, same):
    assert len({rank[case]["digest"] for rank in weighted}) == 1
    for rank in weighted:
        assert rank[case]["loss"] == pytest.approx(rank[same]["loss"], rel=1e-5)


def test_error_feedback_needs_a_cast(weighted):
    assert all("set REDUCTION_WIRE_DTYPE=bf16" in rank["refused"] for rank in weighted)
    assert all(rank["wire_dtype"] == "none" for rank in weighted)
