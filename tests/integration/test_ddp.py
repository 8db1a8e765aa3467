"""Real DDP, real processes: every option against Gloo, errors that leave the model usable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment

pytest.importorskip("torch", reason="needs torch")

CASES = Path(__file__).with_name("ddp_cases.py")
OPTIONS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "many_buckets",
    "no_sync",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
    "join",
    "compile",
)


def run_ranks(
    world_size: int,
    group: str,
    out: Path,
    servers: list[str],
    *,
    script: Path = CASES,
    **settings: str,
) -> list[dict]:
    """Run `ddp_cases.py`, or another script, at every rank and return what each wrote."""
    settings = {"REDUCTION_SERVERS": ",".join(servers), **settings}
    environment = rank_environment(world_size, **settings)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), group],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(said)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    with local_pool(2) as servers:
        return run_ranks(2, "options", tmp_path_factory.mktemp("ddp") / "options.json", servers)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    with local_pool(2) as servers:
        return run_ranks(2, "failures", tmp_path_factory.mktemp("ddp") / "failures.json", servers)


def assert_same_training(ranks: list[dict], case: str) -> None:
    for rank in ranks:
        gloo, reduction = rank[case]["gloo"], rank[case]["reduction"]
        assert len(gloo["losses"]) >= 40
        assert reduction["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
        assert gloo["losses"][-1] < gloo["losses"][0]  # it did learn something
    assert len({rank[case]["reduction"]["digest"] for rank in ranks}) == 1


@pytest.mark.timeout(180)  # the first case pays for all of them, in two processes
@pytest.mark.parametrize("case", OPTIONS)
def test_trains_like_gloo_with_every_option(options: list[dict], case: str) -> None:
    assert_same_training(options, case)


def test_the_reducers_did_the_work(options: list[dict]) -> None:
    # 50 steps of at least the model's 9 KiB, in eight cases and a half and a repetition.
    assert all(rank["bytes_reduced"] > 9 * 50 * 9_000 for rank in options)


def test_a_second_run_gives_the_same_bits(options: list[dict]) -> None:
    for rank in options:
        assert rank["repeat"]["reduction"] == rank["many_buckets"]["reduction"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reducers", [0, 3])
def test_three_ranks_in_fp32(tmp_path: Path, reducers: int) -> None:
    # Without servers every rank hosts a reducer: the embedded default.
    if reducers:
        with local_pool(reducers) as servers:
            ranks = run_ranks(3, "fp32", tmp_path / "fp32.json", servers)
    else:
        ranks = run_ranks(3, "fp32", tmp_path / "fp32.json", [])
    assert_same_training(ranks, "find_unused_parameters")


@pytest.mark.timeout(120)
def test_backward_raises_the_typed_error_and_the_next_step_works(failures: list[dict]) -> None:
    for rank in failures:
        assert rank["errors"]["seen"] == ["ok", "ok", "ReductionTimeout (1,)", "ok", "ok"]
    assert failures[0]["errors"]["raised_after"][0] < 2.5


def test_sparse_gradients_end_in_an_error_of_backward(failures: list[dict]) -> None:
    assert all("sparse" in rank["sparse_in_hook"] for rank in failures)


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        ("bare", "attach(DistributedDataParallel(model))"),
        ("sparse", "sparse=False"),
        ("second", "remove the other attach() or register_comm_hook() call"),
        ("builtin", "fp16_compress_wrapper(reduction_hook)"),
        ("mixed_precision", "torch.autocast"),
        ("python_reducer", "optimize_ddp at its default"),
        ("delay_all_reduce", "wrap the model without it"),
        ("sub_group", "rank 0 of 1"),
    ],
)
def test_attach_refuses_and_names_the_fix(failures: list[dict], case: str, fix: str) -> None:
    assert all(fix in rank["refusals"][case] for rank in failures)
