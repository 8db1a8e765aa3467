"""The process-group backend in real processes: every collective, against Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment

pytest.importorskip("torch", reason="needs torch")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANKS = 3
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


@contextmanager
def ranks(
    out: Path, backend: str, *arguments: str, **settings: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `backend_rank.py` at every rank."""
    environment = rank_environment(RANKS, **settings)
    command = [sys.executable, "-m", "tests.integration.backend_rank", str(out), backend]
    processes = [
        subprocess.Popen(
            [*command, *arguments],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends_of(processes: list[subprocess.Popen[str]], out: Path) -> list[dict[str, Any]]:
    """Wait for the ranks and return what each wrote."""
    said = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(said)
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(RANKS)]


def run_ranks(out: Path, backend: str, **settings: str) -> list[dict[str, str]]:
    """Run all cases at every rank and return how each ended there."""
    with ranks(out, backend, **settings) as processes:
        return ends_of(processes, out)


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


@pytest.mark.timeout(300)
def test_groups_go_on_through_gloo_when_no_reducer_is_left(tmp_path: Path) -> None:
    out, ended = tmp_path / "out", tmp_path / "ended"
    with ExitStack() as stack:
        with local_pool(1) as servers:
            settings = {
                "REDUCTION_SERVERS": ",".join(servers),
                "REDUCTION_FALLBACK": "process-group",
                "REDUCTION_JOB": "train",  # of which each group makes a name of its own
            }
            processes = stack.enter_context(ranks(out, "reduction", str(ended), **settings))
            while len(list(tmp_path.glob("out.*"))) < RANKS:
                assert all(process.poll() is None for process in processes)
                time.sleep(0.05)
        ended.touch()
        ends = ends_of(processes, out)
    assert [end["totals"] for end in ends] == [[[6.0, 3.0]] * 4, [[6.0, 3.0]] * 4, [[6.0]] * 4]
    assert [end["used"] for end in ends] == [[True, True], [True, True], [True]]
