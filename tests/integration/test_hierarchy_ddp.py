"""DDP over nodes, as processes: it trains as without hierarchy, and a rank that dies is named."""

import pytest

from tests.conftest import local_pool
from tests.integration.calls import process_of
from tests.integration.hierarchy_rank import VICTIM
from tests.ranks import environments, ranks

pytest.importorskip("torch", reason="needs torch")

NODES, LOCAL = 2, 2
EVERYBODY = range(NODES * LOCAL)


def run(case, servers, nodes=NODES, **more):
    """Run the case at every rank and return the results of the ranks that were not killed."""
    given = [
        {**environment, **more, "GROUP_RANK": str(rank * nodes // 4)}
        for rank, environment in enumerate(environments(len(EVERYBODY), servers))
    ]
    with ranks(given, "-m", "tests.integration.hierarchy_rank", case) as job:
        return job.results(200, killed=[VICTIM] if case == "lose" else [])


@pytest.mark.extended_cases("0")
@pytest.mark.parametrize("reducers", [0, 2])
def test_ddp_trains_as_without_hierarchy(pool, reducers):
    run("train", pool[:reducers])


@pytest.mark.extended("test_ddp_trains_as_without_hierarchy[2]")
def test_on_one_node_there_is_no_hierarchy(pool):
    run("train", pool, nodes=1)


def test_every_rank_hears_in_time_who_was_killed(pool):
    found = run("lose", pool)
    assert {rank["said"] for rank in found} == {f"RankLostError {VICTIM}"}
    assert all(rank["seconds"] < 3.0 for rank in found)


def test_without_reducers_the_nodes_go_through_process_groups():
    with local_pool(2) as servers:
        victims = ",".join(str(process_of(server).pid) for server in servers)
        for rank in run("fall_back", servers, VICTIMS=victims):
            assert rank["right"] == rank["steps"] >= 8
            assert rank["between"] == NODES


def test_what_cannot_be_combined_is_refused(pool):
    for rank in run("refuse", pool):
        assert "or set REDUCTION_HIERARCHY=off" in rank["said"]
