"""NCCL's collective network without a GPU: nodes do what NCCL's proxy does, and bits count."""

import os
import signal
import time

import pytest

from harness.collective import Calls, Nodes, build, write_inputs
from harness.pool import Pool
from lab import Lab
from reducer.commands.keygen import keygen
from reducer.runtime.keyring import Keyring
from tests.conftest import local_pool, reducer_here

RANKS = 3
MOST_BYTES = 512 << 10
REMOTE_ERROR, SYSTEM_ERROR = 6, 2


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, RANKS, 2 * MOST_BYTES)
    return folder


@pytest.fixture(scope="module")
def pool():
    with local_pool(2) as servers:
        yield {"REDUCTION_SERVERS": ",".join(servers)}


def all_went_well(nodes, calls):
    said = "\n".join(nodes.said)
    assert [node.process.poll() for node in nodes.nodes] == [0] * len(nodes.nodes), said
    for node in nodes.nodes:
        assert [(one.done, one.wrong, one.error) for one in node.outcomes] == [
            (calls.calls, 0, 0)
        ] * calls.lives


@pytest.mark.parametrize(
    "way",
    [
        "8 pool program",
        "9 embedded program",
        "10 pool python",
        "11 embedded python",
        "12 pool program",
    ],
)
@pytest.mark.extended_cases("9", "10", "12")  # other tests call these tables
def test_bits(built, inputs, pool, way):
    """All dtypes and reductions, odd counts, two communicators, tested in any order."""
    version, place, kind = way.split()
    hosts = place == "embedded"
    calls = Calls(200, MOST_BYTES, version=int(version), communicators=2)
    settings = {} if hosts else pool
    with Nodes(built, inputs, RANKS, calls, settings, in_python=kind == "python") as nodes:
        nodes.run()
    all_went_well(nodes, calls)
    said = nodes.said[0]
    assert said.count("ends: 100 all-reduces") == 2
    assert ("a reducer in every rank" if hosts else "2 reducers") in said


def test_more_than_there_is_room_for_is_asked_for_again(built, inputs, pool):
    calls = Calls(300, MOST_BYTES, version=9, ahead=200, dtype=7)
    with Nodes(built, inputs, RANKS, calls, pool) as nodes:
        nodes.run()
    all_went_well(nodes, calls)
    assert all(node.outcomes[0].blocked for node in nodes.nodes)


def test_a_pool_with_keys(built, inputs, tmp_path):
    keygen(tmp_path / "keys", ["one"])
    home = tmp_path / "keys"
    calls = Calls(50, MOST_BYTES, version=10)
    with reducer_here(Keyring.load(home / "pool")) as server:
        settings = {"REDUCTION_SERVERS": server.address, "REDUCTION_KEYS": str(home / "jobs/one")}
        with Nodes(built, inputs, RANKS, calls, settings) as nodes:
            nodes.run()
    all_went_well(nodes, calls)
    assert "job one/nccl-" in nodes.said[0]


def test_a_reducer_that_dies_costs_nothing(built, inputs):
    calls = Calls(500, MOST_BYTES, version=12)
    with Lab.loopback(2) as lab:
        pool = Pool(lab.hosts)
        try:
            settings = {"REDUCTION_SERVERS": ",".join(pool.addresses)}
            with Nodes(built, inputs, RANKS, calls, settings) as nodes:
                nodes.run(at=lambda rank, done: kill(pool, rank, done))
        finally:
            pool.stop()
    all_went_well(nodes, calls)
    assert all("no reducer lost" not in said for said in nodes.said)


def kill(pool, rank, done):
    if rank == 0 and done == 150:
        pool.end(0, signal.SIGKILL)
        pool.launch(0)


@pytest.mark.parametrize("hosts", [False, True], ids=["pool", "embedded"])
def test_a_rank_that_dies_is_named(built, inputs, pool, hosts):
    calls = Calls(100_000, MOST_BYTES, version=8 if hosts else 11)
    killed = []
    with Nodes(built, inputs, RANKS, calls, {} if hosts else pool) as nodes:

        def kill_one(_rank, done):
            if done >= 100 and not killed:
                killed.append(time.monotonic())
                nodes.nodes[1].process.kill()

        nodes.run(at=kill_one)
    for rank in (0, 2):
        (outcome,) = nodes.nodes[rank].outcomes
        assert (outcome.error, outcome.wrong) == (REMOTE_ERROR, 0)
        assert "RankLostError: " in nodes.said[rank]
        assert "rank 1" in nodes.said[rank]
        assert nodes.nodes[rank].ended_at - killed[0] < 2 + BUSY_S


BUSY_S = 2.0  # for a process that has heard of a failure to say so, where others compute


@pytest.mark.extended  # half a minute: until the deadline; a rank that dies stands for it
def test_what_comes_after_a_shutdown_fails(built, inputs, pool):
    """A rank that leaves in the middle: whatever it had asked for is over at the others."""
    calls = Calls(400, MOST_BYTES)
    fewer = Calls(200, MOST_BYTES)
    with Nodes(built, inputs, RANKS, calls, pool, plans={1: fewer}) as nodes:
        nodes.run()
    outcomes = [node.outcomes[0] for node in nodes.nodes]
    assert [one.error for one in outcomes] == [REMOTE_ERROR, 0, REMOTE_ERROR]
    assert [one.wrong for one in outcomes] == [0, 0, 0]


def test_lives_leave_nothing(built, inputs, pool):
    calls = Calls(10, 4096, version=11, lives=20)
    with Nodes(built, inputs, 2, calls, pool) as nodes:
        nodes.run()
    all_went_well_of_two(nodes, calls)


def all_went_well_of_two(nodes, calls):
    for node in nodes.nodes:
        assert node.process.poll() == 0, "\n".join(nodes.said)
        assert [one.done for one in node.outcomes] == [calls.calls] * calls.lives
        files, pages = zip(*node.left, strict=True)
        # A loop's two eventfds are there until Python's collector runs, which is within ten lives.
        assert min(files[10:]) < min(files[:10]) + 10, files
        if "LD_PRELOAD" not in os.environ:  # a sanitizer keeps what is freed
            assert pages[-1] - pages[9] < 256, pages  # 1 MiB in ten lives


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"REDUCTION_FALLBACK": "process-group"}, "REDUCTION_FALLBACK=process-group"),
        ({"REDUCTION_ON_RANK_LOST": "continue"}, "REDUCTION_ON_RANK_LOST=continue"),
        ({"REDUCTION_WIRE_DTYPE": "bf16"}, "REDUCTION_WIRE_DTYPE=bf16"),
        ({"REDUCTION_SERVERS": "", "REDUCTION_ENCRYPT": "1"}, "do not encrypt"),
        ({"REDUCTION_LIBPYTHON": "/none.so"}, "REDUCTION_LIBPYTHON"),
    ],
)
@pytest.mark.extended_cases("settings1", "settings2")
def test_what_cannot_be_is_said(built, inputs, pool, settings, why):
    with Nodes(built, inputs, 1, Calls(1, 4096), {**pool, **settings}) as nodes:
        nodes.run()
    assert nodes.nodes[0].refused == SYSTEM_ERROR
    assert why in nodes.said[0]


def test_ranks_that_look_at_different_places_hear_of_it(built, inputs, pool):
    per_rank = [pool, {}]
    with Nodes(built, inputs, 2, Calls(1, 4096), {}, per_rank=lambda rank: per_rank[rank]) as nodes:
        nodes.run()
    assert [node.refused for node in nodes.nodes] == [SYSTEM_ERROR] * 2
    assert all("MismatchError: start of the job" in said for said in nodes.said)
