"""Ranks of a node reduce among themselves first: real sockets, real reducers, several nodes."""

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest

from reducer.errors import (
    ConfigError,
    MismatchError,
    RankLostError,
    ReductionTimeout,
)
from tests.conftest import reducer_here
from tests.integration.calls import Board, check_bits, errors_of, ones, reduced
from tests.waits import eventually, within_s
from torture.guarantee_oracle import FLOATS, TYPES
from worker_client.client import compose
from worker_client.communicators import hierarchical
from worker_client.communicators.placement import arrange
from worker_client.config import WorkerConfig
from worker_client.protocol.spec import Heartbeats, JobSpec

numbers = itertools.count()


@contextmanager
def ranks_on(nodes, local, servers, wire_dtype="none"):
    """All ranks of a job as clients in this process."""
    keys = [str(rank // local) for rank in range(nodes * local)]
    number, board = next(numbers), Board()

    def join(rank):
        place = arrange(keys, rank)
        job = f"hierarchy-{number}-{place.local_rank}"
        patient = Heartbeats(peer_timeout_s=4.0)  # all ranks are threads of this one process
        spec = JobSpec(job, 0, place.node, nodes, tuple(servers), 0, heartbeats=patient)
        node = compose.Node(place, lambda topic: board.meet(topic, place.peers, place.local_rank))
        return compose.client(WorkerConfig(timeout=20.0, wire_dtype=wire_dtype), spec, node=node)

    with ExitStack() as stack, ThreadPoolExecutor(nodes * local) as pool:
        yield [stack.enter_context(client) for client in list(pool.map(join, range(nodes * local)))]


@pytest.fixture(scope="module")
def six(pool):
    """Two nodes of three ranks each."""
    with ranks_on(2, 3, pool) as clients:
        yield clients


def check(six, dtype="float32", op="mean", count=100):
    check_bits(six, dtype, op, count, nodes=2)


failures = partial(errors_of, within_s=20.0)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_rank_has_the_bits_of_the_stated_order(six, dtype, op):
    if op == "mean" and dtype not in FLOATS:
        for client in six:
            with pytest.raises(ConfigError, match="the mean of"):
                client.all_reduce(np.zeros(3, dtype), op)
        return
    for count in (0, 1, 2, 3, 1000, 10_007):
        check(six, dtype, op, count)


def test_16_bits_on_the_wire_depend_on_the_tensor_not_on_its_parts(servers):
    with ranks_on(2, 2, servers, wire_dtype="fp16") as clients:
        for count, mean in ((4096, 1.0), (4095, 1 + 2.0**-12)):
            rows = [np.full(count, 1 + 2.0**-12, np.float32) for _ in clients]
            assert all(set(result) == {mean} for result in reduced(clients, rows))
        rows = [np.full(4096, 40_000, np.float32) for _ in clients]  # of which two are too many
        assert all(set(result) == {40_000} for result in reduced(clients, rows))


def test_a_node_sends_each_buffer_once():
    with reducer_here() as server, ranks_on(2, 3, [server.address]) as clients:
        check(clients, count=30_000)
        nbytes = 4 * 30_000
        eventually(lambda: server.counters.bytes_in >= 2 * nbytes)
        assert server.counters.bytes_in == pytest.approx(2 * nbytes, rel=0.02)
        assert [client.bytes_reduced for client in clients] == [nbytes] * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_buffers_go_in_pieces(six, monkeypatch, dtype):
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 4096)
    for count in (1023, 1024, 1025, 50_001):
        check(six, dtype, count=count)


@pytest.mark.parametrize("wire_dtype", ["none", "bf16"])
def test_a_weighted_mean(servers, wire_dtype):
    with ranks_on(2, 2, servers, wire_dtype=wire_dtype) as clients:
        how = {"nodes": 2, "wire_dtype": wire_dtype.replace("none", "")}
        check_bits(clients, "float32", "mean", 5000, weights=(1.0, 0.0, 2.5, 4.0), **how)
        some = [client.all_reduce(np.ones(9), weight=client.rank or None) for client in clients]
        assert all(isinstance(error, MismatchError) for error in errors_of(some))
        if wire_dtype != "none":
            some = [c.all_reduce(ones(5000), exact=c.rank % 2 == 0) for c in clients]
            assert {error.field for error in errors_of(some)} == {"exact"}
        check(clients, "float64")


def test_what_a_cast_takes_away_from_a_node_is_added_to_its_next_sum(servers):
    with ranks_on(2, 2, servers, wire_dtype="bf16") as clients:
        count, calls = 8192, 64
        values = np.random.default_rng(0).standard_normal((4, count), np.float32)
        residuals = [np.zeros(count, np.float32) for _ in clients]
        total = np.zeros(count)
        for _ in range(calls):
            (result, *_) = reduced(clients, [v.copy() for v in values], "sum", residual=residuals)
            total += result
        want = np.sum(values, axis=0, dtype=np.float64)
        step = np.abs(want).max() * 2**-8  # of one rounding; the result's own is not kept
        assert np.abs(total / calls - want).max() <= 1.2 * step
        for place, kept in enumerate(residuals):
            half = slice(count // 2 * (place % 2), count // 2 * (place % 2 + 1))
            assert kept[half].any()
            kept[half] = 0
            assert not kept.any(), "a rank keeps what was taken away from its own part"


def test_what_fails_between_nodes_fails_everywhere_and_the_next_one_works(six):
    works = [client.all_reduce(np.zeros(12 if client.rank < 3 else 24)) for client in six]
    for error in failures(works):
        assert isinstance(error, MismatchError)
        assert (error.rank, error.other_rank) in {(0, 3), (3, 0)}
        assert "between nodes" in str(error)
    works = [client.all_reduce(np.zeros(6), timeout="500ms") for client in six[:3]]
    for error in failures(works):
        assert isinstance(error, ReductionTimeout)
        assert error.missing == (3,)  # of the first part's job; the other two miss 4 and 5
    failures([client.all_reduce(np.zeros(6), timeout="500ms") for client in six[3:]])
    check(six)


def test_ranks_of_a_node_that_disagree_are_named_and_the_next_call_works(six):
    start = time.monotonic()
    works = [
        client.all_reduce(np.zeros(4, np.float64 if client.rank == 5 else np.float32))
        for client in six
    ]
    far, near = failures(works[:3]), failures(works[3:])
    within_s(5.0, start)
    for error in near:
        assert isinstance(error, MismatchError)
        assert (error.field, error.rank, error.other_rank) == ("total_bytes", 3, 5)
    for error in far:
        assert isinstance(error, MismatchError)
        assert error.field == "call"
        assert "within a node: ranks disagree" in str(error)
    check(six)


def test_what_is_sent_to_a_rank_that_has_ended_raises_no_sigpipe(broken_pipes):
    with ThreadPoolExecutor(2) as pool:
        left, gone = pool.map(partial(Board().meet, "", (0, 1)), range(2))
    gone.close()
    nothing = memoryview(b"")
    with pytest.raises(RankLostError):
        left.exchange(0, [nothing, memoryview(b"word")], [nothing, nothing], time.monotonic() + 5)
    left.give_up(ReductionTimeout("too late"))
    left.close()
    assert broken_pipes == []


class Disturbed(Board):
    """Where something else connects to the first rank before the other one does."""

    def __setitem__(self, key, name):
        if key == ("", 0):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(f"\0{name}")
        super().__setitem__(key, name)


def test_a_stranger_at_the_door_is_sent_away():
    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(partial(Disturbed().meet, "", (0, 1)), range(2)))
        until = time.monotonic() + 5
        both = [pool.submit(one.agree, 0, b"%d" % one.local_rank, until) for one in nodes]
        assert [one.result() for one in both] == [[b"0", b"1"]] * 2
    for one in nodes:
        one.close()
