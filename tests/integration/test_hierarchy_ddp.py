"""DDP over nodes, as processes: it trains as without hierarchy, and a rank that dies is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reducer import local_pool
from tests.integration.hierarchy_rank import VICTIM
from tests.integration.launch import rank_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch", reason="needs torch")

RANK = Path(__file__).with_name("hierarchy_rank.py")
NODES, LOCAL = 2, 2
EVERYBODY = range(NODES * LOCAL)


@pytest.fixture(scope="module")
def pool() -> Iterator[list[str]]:
    with local_pool(2) as servers:
        yield servers


def run(
    case: str, folder: Path, servers: list[str], nodes: int = NODES, **settings: str
) -> dict[int, Any]:
    """Run the case at every rank and return what those wrote that came to their end."""
    environment = rank_environment(len(EVERYBODY), REDUCTION_SERVERS=",".join(servers), **settings)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), case, str(folder / "out.json")],
            env={**environment, "RANK": str(rank), "GROUP_RANK": str(rank * nodes // 4)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in EVERYBODY
    ]
    try:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [rank for rank in EVERYBODY if ranks[rank].returncode]
    assert failed == ([VICTIM] if case == "lose" else []), "\n".join(said)
    return {
        rank: json.loads((folder / f"out.json.{rank}").read_text())
        for rank in EVERYBODY
        if rank not in failed
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize("reducers", [0, 2])
def test_ddp_trains_as_without_hierarchy(tmp_path: Path, pool: list[str], reducers: int) -> None:
    found = run("train", tmp_path, pool[:reducers])
    for rank in found.values():
        assert (rank["off"]["kind"], rank["auto"]["kind"]) == ("Client", "HierarchicalClient")
        assert rank["auto"]["losses"] == pytest.approx(rank["off"]["losses"], rel=1e-5)
        assert rank["auto"]["names"] == [f"rank {rank}" for rank in EVERYBODY]
        assert rank["auto"]["by_name"] == rank["off"]["by_name"] == [4, 8, 12]
    node = sum(found[rank]["auto"]["bytes_reduced"] for rank in range(LOCAL))
    assert node == found[0]["off"]["bytes_reduced"]
    for mode in ("off", "auto"):
        assert len({rank[mode]["weights"] for rank in found.values()}) == 1


@pytest.mark.timeout(240)
def test_on_one_node_there_is_no_hierarchy(tmp_path: Path, pool: list[str]) -> None:
    found = run("train", tmp_path, pool, nodes=1)
    assert {rank["auto"]["kind"] for rank in found.values()} == {"Client"}
    assert all(rank["auto"]["losses"] == rank["off"]["losses"] for rank in found.values())


@pytest.mark.timeout(240)
def test_every_rank_hears_in_time_who_was_killed(tmp_path: Path, pool: list[str]) -> None:
    found = run("lose", tmp_path, pool)
    assert {rank["said"] for rank in found.values()} == {f"RankLostError {VICTIM}"}
    assert all(rank["seconds"] < 3.0 for rank in found.values())


@pytest.mark.timeout(240)
def test_what_cannot_be_combined_is_refused(tmp_path: Path, pool: list[str]) -> None:
    for rank in run("refuse", tmp_path, pool).values():
        assert "or set REDUCTION_HIERARCHY=off" in rank["said"]
