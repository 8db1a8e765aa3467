"""The process-group backend in real processes: every collective, against Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment

pytest.importorskip("torch", reason="needs torch")

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3
CASES = (
    "all_reduce",
    "shapes",
    "what_reducers_do_not_do",
    "coalesced",
    "reduce_scatter",
    "others",
    "work_object",
    "groups",
    "ddp",
    "fsdp",
    "failures",
)


def run_ranks(out: Path, backend: str, **settings: str) -> list[dict[str, str]]:
    """Run `backend_rank.py` at every rank and return how each case ended there."""
    environment = rank_environment(RANKS, **settings)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.backend_rank", str(out), backend],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=250)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    with local_pool(2) as servers:
        out = tmp_path_factory.mktemp("backend") / "pool"
        return run_ranks(out, "reduction", REDUCTION_SERVERS=",".join(servers))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("backend") / "embedded"
    return run_ranks(out, "cpu:reduction,cuda:reduction")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_through_a_pool(pool: list[dict[str, str]], case: str) -> None:
    assert [rank[case] for rank in pool] == [""] * RANKS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_embedded_and_by_device(embedded: list[dict[str, str]], case: str) -> None:
    assert [rank[case] for rank in embedded] == [""] * RANKS
