"""Real DDP, real processes: 16 bits on the wire, error feedback, weights of unequal batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from reducer import local_pool
from tests.integration.test_ddp import run_ranks

pytest.importorskip("torch", reason="needs torch")

SCRIPT = Path(__file__).with_name("wire_ddp.py")
PATHS = {"PYTHONPATH": str(SCRIPT.parents[2])}


@pytest.fixture(scope="module")
def servers() -> list[str]:
    with local_pool(2) as addresses:
        yield addresses


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def compressed(
    request: pytest.FixtureRequest, servers: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    out = tmp_path_factory.mktemp("wire") / "out.json"
    cases = "stock,plain,feedback,weighted,wrapper"
    settings = {"REDUCTION_WIRE_DTYPE": request.param, **PATHS}
    return run_ranks(2, cases, out, servers, script=SCRIPT, **settings)


@pytest.fixture(scope="module")
def weighted(servers: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    out = tmp_path_factory.mktemp("weights") / "out.json"
    cases = "weighted,alone,join,alone-join,refused"
    return run_ranks(3, cases, out, servers, script=SCRIPT, **PATHS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", ["plain", "feedback", "weighted", "wrapper"])
def test_ranks_agree_to_the_bit(compressed: list[dict], case: str) -> None:
    assert len({rank[case]["digest"] for rank in compressed}) == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", ["plain", "feedback", "wrapper"])
def test_it_trains_nearly_like_gloo_in_float32(compressed: list[dict], case: str) -> None:
    rank = compressed[0]
    assert rank[case]["loss"] == pytest.approx(rank["stock"]["loss"], rel=1e-3)
    assert rank[case]["loss"] != rank["stock"]["loss"]  # it was rounded indeed


@pytest.mark.timeout(180)
def test_residuals_are_kept_for_each_bucket(compressed: list[dict]) -> None:
    for rank in compressed:
        assert rank["plain"]["residuals"] == []
        assert len(rank["feedback"]["residuals"]) >= 2
        assert max(rank["feedback"]["residuals"]) > 0
        assert rank["feedback"]["digest"] != rank["plain"]["digest"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("case", "same"), [("weighted", "alone"), ("join", "alone-join")])
def test_unequal_batches_train_like_one_process_with_all_samples(
    weighted: list[dict], case: str, same: str
) -> None:
    assert len({rank[case]["digest"] for rank in weighted}) == 1
    for rank in weighted:
        assert rank[case]["loss"] == pytest.approx(rank[same]["loss"], rel=1e-5)


@pytest.mark.timeout(180)
def test_error_feedback_needs_a_cast(weighted: list[dict]) -> None:
    assert all("set REDUCTION_WIRE_DTYPE=bf16" in rank["refused"] for rank in weighted)
    assert all(rank["wire_dtype"] == "float32" for rank in weighted)
