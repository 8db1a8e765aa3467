"""Ranks of a node reduce among themselves first: real sockets, real reducers, several nodes."""

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from reducer.errors import (
    ConfigError,
    MismatchError,
    RankLostError,
    ReductionTimeout,
)
from reducer.wire.constants import DType
from tests import inside
from tests.integration.calls import Board, errors_of, reduced
from tests.waits import within_s
from worker_client.client.compose import Composer
from worker_client.communicators import hierarchical
from worker_client.communicators.placement import arrange
from worker_client.protocol.spec import Heartbeats, JobSpec
from worker_client.runtime import implementation

STEPS = {
    "sum": np.add,
    "mean": np.add,
    # NumPy does not say which zero its own minimum and maximum return; ours is the earlier rank's.
    "min": lambda earlier, later: np.where((later < earlier) | np.isnan(later), later, earlier),
    "max": lambda earlier, later: np.where((later > earlier) | np.isnan(later), later, earlier),
    "product": np.multiply,
}
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8"]
numbers = itertools.count()


@contextmanager
def ranks_on(nodes, local, servers, wire_dtype=None):
    """All ranks of a job as clients in this process."""
    keys = [str(rank // local) for rank in range(nodes * local)]
    number, board = next(numbers), Board()

    def join(rank):
        place = arrange(keys, rank)
        job = f"hierarchy-{number}-{place.local_rank}"
        patient = Heartbeats(patience_s=4.0)  # all ranks are threads of this one process
        spec = JobSpec(job, 0, place.node, nodes, tuple(servers), 0, heartbeats=patient)
        composer = Composer(
            implementation.select(None),
            20.0,
            10.0,
            wire_dtype=wire_dtype,
            place=place,
            meet=lambda topic: board.meet(topic, place.peers, place.local_rank),
        )
        return composer.client(spec)

    with ExitStack() as stack, ThreadPoolExecutor(nodes * local) as pool:
        yield [stack.enter_context(client) for client in list(pool.map(join, range(nodes * local)))]


@pytest.fixture(scope="module")
def six(servers):
    """Two nodes of three ranks each."""
    with ranks_on(2, 3, servers) as clients:
        yield clients


def contributions(dtype, count, ranks):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    sources = [np.random.default_rng([count, rank]) for rank in range(ranks)]
    if "int" in dtype:
        return [source.integers(0, 100, count).astype(kind) for source in sources]
    return [(source.standard_normal(count) * 3 + 0.1).astype(kind) for source in sources]


def expected(rows, op, local):
    """Fold in local-rank order, then in node order; round once."""
    kind = rows[0].dtype
    wide = [row.astype(np.float32) if kind.itemsize == 2 else row for row in rows]
    with np.errstate(all="ignore"):
        sums = []
        for first in range(0, len(rows), local):
            folded = wide[first].copy()
            for row in wide[first + 1 : first + local]:
                folded = STEPS[op](folded, row)
            sums.append(folded)
        total = sums[0]
        for one in sums[1:]:
            total = STEPS[op](total, one)
        if op == "mean":
            total = total / total.dtype.type(len(rows))
        return total.astype(kind)


def check(clients, dtype, op, count):
    rows = contributions(dtype, count, len(clients))
    want = expected(rows, op, len(inside.communicator(clients[0]).place.peers))
    for result in reduced(clients, rows, op):
        assert result.tobytes() == want.tobytes()


failures = partial(errors_of, within_s=20.0)


@pytest.mark.parametrize("op", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_has_the_bits_of_the_stated_order(six, dtype, op):
    if op == "mean" and "int" in dtype:
        for client in six:
            with pytest.raises(ConfigError, match="the mean of"):
                client.all_reduce(np.zeros(3, dtype), op)
        return
    for count in (0, 1, 2, 3, 1000, 10_007):
        check(six, dtype, op, count)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_of_two_zeros_the_earlier_ranks_stays(six, dtype, op):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    signs = list(itertools.product([0.0, -0.0], repeat=len(six)))
    patterns = np.array(signs * 3, kind)  # as many as vectors have, and some more
    rows = [patterns[:, rank].copy() for rank in range(len(six))]
    for result in reduced(six, rows, op):
        assert result.tobytes() == patterns[:, 0].tobytes()


def test_16_bits_on_the_wire_depend_on_the_tensor_not_on_its_parts(servers):
    with ranks_on(2, 2, servers, wire_dtype=DType.FLOAT16) as clients:
        for count, mean in ((4096, 1.0), (4095, 1 + 2.0**-12)):
            rows = [np.full(count, 1 + 2.0**-12, np.float32) for _ in clients]
            assert all(set(result) == {mean} for result in reduced(clients, rows))
        rows = [np.full(4096, 40_000, np.float32) for _ in clients]  # of which two are too many
        assert all(set(result) == {40_000} for result in reduced(clients, rows))


def test_a_node_sends_each_buffer_once(six, monkeypatch):
    sent = [0] * len(six)

    def count(rank, submit, operation):
        sent[rank] += operation.view.nbytes
        submit(operation)

    for rank, client in enumerate(six):
        driver = inside.communicator(client).flat
        monkeypatch.setattr(driver, "submit", partial(count, rank, driver.submit))
    before = [client.bytes_reduced for client in six]
    check(six, "float32", "mean", 30_000)
    assert sum(sent[:3]) == sum(sent[3:]) == 4 * 30_000
    assert [client.bytes_reduced - then for client, then in zip(six, before, strict=True)] == [
        4 * 30_000
    ] * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_buffers_go_in_pieces(six, monkeypatch, dtype):
    monkeypatch.setattr(hierarchical, "PIECE_BYTES", 4096)
    for count in (1023, 1024, 1025, 50_001):
        check(six, dtype, "mean", count)


def test_nan_and_infinity_pass_and_overflow_is_silent(six):
    for dtype in ("float32", "float16", ml_dtypes.bfloat16):
        rows = [np.zeros(4, dtype) for _ in six]
        rows[1][0], rows[4][1] = np.nan, np.inf
        for row in rows:
            row[2] = 3e4 if dtype == "float16" else 3e38
        results = reduced(six, rows, "sum")
        assert len({result.tobytes() for result in results}) == 1
        assert np.isnan(results[0][0])
        assert np.isposinf(results[0][1:3].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("wire_dtype", "bound"),
    [(None, 1e-6), (DType.BFLOAT16, 2**-7), (DType.BLOCK8, 3.1 / 254), (DType.BLOCK8_E4M3, 0.2)],
    ids=["float32", "bfloat16", "block8", "block8_e4m3"],
)
def test_a_weighted_mean(servers, wire_dtype, bound):
    with ranks_on(2, 2, servers, wire_dtype=wire_dtype) as clients:
        weights = [1.0, 0.0, 2.5, 4.0]
        given = contributions("float32", 5000, 4)
        given[1][:] = np.nan  # of a rank that has nothing to say
        scaled = np.stack([np.nan_to_num(row) for row in given]) * np.array(weights)[:, None]
        want = scaled.sum(axis=0) / sum(weights)
        results = reduced(clients, given, weight=weights)
        assert len({result.tobytes() for result in results}) == 1
        assert np.abs(results[0] - want).max() <= bound * np.abs(scaled).max()
        some = [client.all_reduce(np.ones(9), weight=client.rank or None) for client in clients]
        assert all(isinstance(error, MismatchError) for error in errors_of(some))
        if wire_dtype is not None:
            some = [c.all_reduce(given[2].copy(), exact=c.rank % 2 == 0) for c in clients]
            assert {error.field for error in errors_of(some)} == {"exact"}
        check(clients, "float64", "mean", 100)


def test_what_a_cast_takes_away_from_a_node_is_added_to_its_next_sum(servers):
    with ranks_on(2, 2, servers, wire_dtype=DType.BFLOAT16) as clients:
        count, calls = 8192, 64
        values = [row.astype(np.float32) for row in contributions("float32", count, 4)]
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
    check(six, "float32", "mean", 100)


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
    check(six, "float32", "mean", 100)


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
