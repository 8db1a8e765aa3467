"""The process-group backend in real processes: every collective, against Gloo."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reducer import local_pool
from tests.ranks import environments, ranks, run

pytest.importorskip("torch", reason="needs torch")

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3
RANK = ("-m", "tests.integration.backend_rank")
CASES = (
    "all_reduce",
    "shapes",
    "what_reducers_do_not_do",
    "coalesced",
    "reduce_scatter",
    "others",
    "tensors_that_gloo_frees",
    "work_object",
    "groups",
    "ddp",
    "fsdp",
    "failures",
)


@pytest.fixture(scope="module")
def pool() -> list[dict[str, str]]:
    with local_pool(2) as servers:
        return run(environments(RANKS, servers), *RANK, "reduction")


@pytest.fixture(scope="module")
def embedded() -> list[dict[str, str]]:
    return run(environments(RANKS), *RANK, "cpu:reduction,cuda:reduction")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_through_a_pool(pool: list[dict[str, str]], case: str) -> None:
    assert [rank[case] for rank in pool] == [""] * RANKS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_embedded_and_by_device(embedded: list[dict[str, str]], case: str) -> None:
    assert [rank[case] for rank in embedded] == [""] * RANKS


@pytest.mark.timeout(300)
def test_groups_go_on_through_gloo_when_no_reducer_is_left(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    with ExitStack() as stack:
        with local_pool(1) as servers:
            settings = {
                "REDUCTION_FALLBACK": "process-group",
                "REDUCTION_JOB": "train",  # of which each group makes a name of its own
            }
            given = environments(RANKS, servers, **settings)
            job = stack.enter_context(ranks(given, *RANK, "reduction", ended))
            while not all("reduced" in rank.out for rank in job):
                assert all(rank.poll() is None for rank in job)
                time.sleep(0.05)
        ended.touch()
        ends = job.results(250)
    assert [end["totals"] for end in ends] == [[[6.0, 3.0]] * 4, [[6.0, 3.0]] * 4, [[6.0]] * 4]
    assert [end["used"] for end in ends] == [[True, True], [True, True], [True]]
