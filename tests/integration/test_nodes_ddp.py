"""Ranks of nodes, as processes: the bits, what the card carries, and a rank that dies."""

import pytest

from tests.conftest import local_pool, reducer_here
from tests.integration.calls import process_of
from tests.integration.node_rank import COUNTS, TYPES_TRIED, VICTIM, WIRE_DTYPES
from tests.ranks import environments, ranks
from tests.waits import eventually

pytest.importorskip("torch", reason="needs torch")

NODES = 2


def run(case, servers, nodes=NODES, ranks_in_all=4, **more):
    """Run the case at every rank and return the results of the ranks that were not killed."""
    given = [
        {**environment, **more, "GROUP_RANK": str(rank * nodes // ranks_in_all)}
        for rank, environment in enumerate(environments(ranks_in_all, servers))
    ]
    with ranks(given, "-m", "tests.integration.node_rank", case) as job:
        return job.results(200, killed=[VICTIM] if case in {"lose", "go_on"} else [])


@pytest.mark.extended_cases("3-4", "1-8")
@pytest.mark.parametrize(("reducers", "everybody"), [(1, 4), (3, 8), (3, 4), (1, 8)])
def test_every_rank_has_the_bits_of_the_stated_order(reducers, everybody):
    with local_pool(reducers) as servers:
        found = run("bits", servers, ranks_in_all=everybody)
    calls = len(WIRE_DTYPES) * len(TYPES_TRIED) * len(COUNTS)
    assert [rank["calls"] for rank in found] == [calls] * everybody


def test_a_node_sends_each_bucket_once():
    with reducer_here() as server:
        found = run("cross", [server.address])
        eventually(lambda: server.counters.bytes_in >= NODES * found[0]["nbytes"])
        assert server.counters.bytes_in == pytest.approx(NODES * found[0]["nbytes"], rel=0.02)
    assert all(rank["right"] for rank in found)


def test_a_node_that_loses_a_rank_is_lost_and_the_others_go_on(pool):
    survivors, (left,) = (found := run("go_on", pool))[:2], found[2:]
    for rank in survivors:
        assert rank["said"] == ""
        assert len(rank["seen"]) == 40
        assert set(rank["seen"]) == {2.5, 1.5}  # of all four, and of the first node
        assert rank["seen"] == sorted(rank["seen"], reverse=True)
        assert rank["present"] == [0, 1]
        assert rank["lost"] == [[2, 3]]
    assert survivors[0]["seen"] == survivors[1]["seen"]
    assert left["said"] == f"RankLostError {VICTIM}"


def test_fsdp_averages_over_replicas(pool):
    assert all(rank["bytes"] > 0 for rank in run("shard", pool))


@pytest.mark.extended_cases("0")
@pytest.mark.parametrize("reducers", [0, 2])
def test_ddp_trains_as_through_gloo(pool, reducers):
    for rank in run("train", pool[:reducers]):
        assert rank["losses"][-1] < rank["losses"][0] / 2


@pytest.mark.extended("test_ddp_trains_as_through_gloo[2]")
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
