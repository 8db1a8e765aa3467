"""float32 buffers that travel in 16 or 8 bits, and weighted means: bits, bounds, errors."""

import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from harness import block8_oracle
from reducer.errors import ConfigError, LocalProtocolError, MismatchError, ReductionTimeout
from reducer.wire.constants import ReduceOp
from tests import inside
from tests.conftest import joined, local_pool
from tests.integration.calls import errors_of, process_of, reduced
from worker_client._packing import all_reduce_arrays
from worker_client.client.bootstrap import connect
from worker_client.communicators import casting
from worker_client.runtime.driver import AHEAD
from worker_client.staging import wire_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

FP8 = pytest.param(
    "fp8_e4m3", marks=pytest.mark.extended("tests/kernels/test_block8.py::test_the_bits")
)
WIRES = pytest.mark.parametrize("wire", ["bf16", "int8", FP8])

SMALL = wire_rule.SMALLEST_BYTES // 4
LARGE = casting.LARGE_BYTES // 4
COUNTS = (SMALL, SMALL + 1, 20 * 252, LARGE - 1, LARGE, LARGE + 13)  # elements
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def values(rank, count):
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32)


def travelled(array, wire):
    """What arrives of a float32 buffer that travels in 16 bits."""
    return torch.from_numpy(array).to(NARROW[wire]).float().numpy()


def oracle(given, wire, op):
    """The reduction of what arrives, in the ranks' order, rounded once more."""
    if op in {ReduceOp.MIN, ReduceOp.MAX}:  # blocks of which travel as they are
        fold = np.min if op is ReduceOp.MIN else np.max
        return fold([a if wire in block8_oracle.Q else travelled(a, wire) for a in given], axis=0)
    if wire in block8_oracle.Q:
        return block8_oracle.reduced(given, wire, mean=op is ReduceOp.MEAN)
    total = functools.reduce(np.add, [travelled(array, wire) for array in given])
    return travelled(total / np.float32(len(given) if op is ReduceOp.MEAN else 1), wire)


def check(clients, count, wire="bf16", op="mean"):
    """Make an all-reduce; every rank must have the oracle's bits."""
    given = [values(client.rank, count) for client in clients]
    expected = oracle(given, wire, ReduceOp[op.upper()]).tobytes()
    assert [a.tobytes() for a in reduced(clients, given, op)] == [expected] * len(clients)


@pytest.mark.extended_cases("fp16", "fp8")
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8", "fp8_e4m3"])
def test_every_rank_has_the_oracles_bits(job, wire):
    clients = job(3, wire_dtype=wire)
    for count in COUNTS:
        for op in ("sum", "mean", "min", "max") if count < LARGE else ("mean",):
            before = clients[0].bytes_reduced
            check(clients, count, wire, op)
            assert clients[0].bytes_reduced - before == 4 * count


@WIRES
def test_what_tensors_are_packed_with_does_not_change_them(job, wire):
    clients = job(2, wire_dtype=wire, cycle_time=0.05)  # which packs all of a step
    for first in (True, False):
        counts = [np.array([100_257.0], np.float32) for _ in clients]
        large = [values(rank, SMALL) for rank in range(2)]
        expected = oracle(large, wire, ReduceOp.SUM).tobytes()
        named = {
            **({"count": counts} if first else {}),
            **{f"small {at}": [np.ones(SMALL - 1, np.float32) for _ in clients] for at in range(4)},
            **({} if first else {"count": counts}),
            **{f"large {at}": [array.copy() for array in large] for at in range(2)},
        }
        works = [
            client.all_reduce(arrays[rank], "sum", name=name)
            for name, arrays in named.items()
            for rank, client in enumerate(clients)
        ]
        for work in works:
            work.wait(20)
        assert [float(count[0]) for count in counts] == [2 * 100_257.0] * 2
        for at in range(2):
            assert [array.tobytes() for array in named[f"large {at}"]] == [expected] * 2


@WIRES
def test_what_adapters_pack_travels_as_it_would_alone(job, wire):
    clients = job(2, wire_dtype=wire)
    large = [values(rank, SMALL) for rank in range(2)]
    expected = oracle(large, wire, ReduceOp.SUM).tobytes()
    count = np.array([100_257.0], np.float32)
    almost = np.full(SMALL - 1, 1 + 2.0**-12, np.float32)

    def pack(client):
        mine = [count, large[client.rank], almost, np.ones(3), almost, large[client.rank]]
        return all_reduce_arrays(client, mine, "sum")

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(pack, clients):
            assert got[0].tolist() == [2 * 100_257.0]
            assert [got[1].tobytes(), got[5].tobytes()] == [expected] * 2
            assert got[2].tobytes() == got[4].tobytes() == (2 * almost).tobytes()
            assert got[3].tolist() == [2.0] * 3


@WIRES
def test_what_is_small_or_no_float32_or_a_product_travels_as_it_is(job, wire):
    plain, cast = job(2, job="plain"), job(2, wire_dtype=wire)
    for count, dtype, op in (
        (SMALL - 1, np.float32, "mean"),
        (SMALL, np.float64, "mean"),
        (SMALL, np.float32, "product"),
        (SMALL, np.float16, "sum"),
        (SMALL, np.int32, "sum"),
    ):
        ends = [
            reduced(clients, [(100 * values(rank, count)).astype(dtype) for rank in range(2)], op)
            for clients in (plain, cast)
        ]
        assert [a.tobytes() for a in ends[0]] == [a.tobytes() for a in ends[1]]


@WIRES
def test_tensors_and_strided_memory(job, wire):
    clients = job(2, wire_dtype=wire)
    given = [values(rank, 2 * SMALL).reshape(2, SMALL) for rank in range(2)]
    expected = oracle([a.T.ravel() for a in given], wire, ReduceOp.MEAN).reshape(SMALL, 2)
    tensors = [torch.from_numpy(a.copy()).t() for a in given]
    for tensor in reduced(clients, tensors):
        np.testing.assert_array_equal(tensor.numpy(), expected)
    for array in reduced(clients, [a.T for a in given]):
        np.testing.assert_array_equal(array, expected)


@WIRES
def test_what_is_to_be_exact_travels_as_it_is(job, wire):
    clients = job(2, wire_dtype=wire, cycle_time=0.05)  # which packs all of a step
    for count in (SMALL, LARGE):
        given = [values(rank, count) for rank in range(2)]
        expected = (given[0] + given[1]).tobytes()
        ends = reduced(clients, [a.copy() for a in given], "sum", exact=True)
        assert [a.tobytes() for a in ends] == [expected] * 2
        works = [
            client.all_reduce(
                given[client.rank].copy(), "sum", name=f"{at}", exact=np.bool_(at % 2 == 0)
            )
            for at in range(4)
            for client in clients
        ]
        ends = [work.wait(30).tobytes() for work in works]
        rounded = oracle(given, wire, ReduceOp.SUM).tobytes()
        assert ends == [expected, expected, rounded, rounded] * 2
    weighted = reduced(clients, [a.copy() for a in given], weight=2.0, exact=True)
    assert [a.tobytes() for a in weighted] == [((given[0] + given[1]) / 2).tobytes()] * 2


def test_a_value_that_is_not_finite_spoils_its_block_alone(job):
    clients = job(2, wire_dtype="int8")
    given = [values(rank, SMALL) for rank in range(2)]
    given[0][300], given[1][1000] = np.nan, np.inf
    expected = oracle(given, "int8", ReduceOp.MEAN)
    for array in reduced(clients, given):
        assert array.tobytes() == expected.tobytes()
        assert np.flatnonzero(np.isnan(array)).tolist() == [*range(252, 504), *range(756, 1008)]


@WIRES
def test_a_job_that_may_lose_ranks_does_not_cut_calls_and_goes_on_without_one(job, wire):
    clients = job(3, wire_dtype=wire, on_rank_lost="continue")
    given = [values(rank, LARGE) for rank in range(3)]
    expected = oracle(given, wire, ReduceOp.MEAN).tobytes()
    works = [clients[0].all_reduce(given[0])]
    (operation,) = open_at(clients[0])
    assert not operation.more
    works += [client.all_reduce(given[client.rank]) for client in clients[1:]]
    assert [work.wait(20).tobytes() for work in works] == [expected] * 3
    clients[2].shutdown()
    for count in (SMALL + 1, LARGE):
        check(clients[:2], count, wire)
    assert clients[0].present == (0, 1)
    with pytest.raises(ConfigError, match="on_rank_lost='continue'"):
        clients[0].all_reduce(given[0], weight=2.0)


@pytest.mark.extended_cases("int8")
@WIRES
def test_a_reducer_may_die_between_the_pieces(wire):
    given = [values(rank, 4 * LARGE) for rank in range(2)]
    expected = oracle(given, wire, ReduceOp.MEAN).tobytes()
    with (
        local_pool(2) as servers,
        joined(2, servers=servers, job="dies", wire_dtype=wire) as clients,
    ):
        mortal = process_of(servers[1])  # looking for it takes longer than the all-reduce
        works = [c.all_reduce(a) for c, a in zip(clients, given, strict=True)]
        mortal.kill()
        assert [work.wait(30).tobytes() for work in works] == [expected] * 2
        assert clients[0].counters.losses == 1


def open_at(client):
    """What is in progress at the reducers."""
    return list(inside.flat(client).core.open)


@pytest.mark.parametrize(
    ("wire", "counts"),
    [
        *(("bf16", (LARGE, other)) for other in (LARGE + 16, 3 * LARGE, SMALL)),
        *(("int8", (count, count + 1)) for count in (SMALL, LARGE)),  # which fill as many blocks
    ],
)
def test_other_sizes_are_named_and_the_next_calls_work(job, wire, counts):
    clients = job(2, wire_dtype=wire, timeout=3)
    works = [c.all_reduce(values(0, n)) for c, n in zip(clients, counts, strict=True)]
    for error in errors_of(works, within_s=2):
        assert isinstance(error, MismatchError)
        if wire == "int8" or error.field != "total_bytes":  # the first pieces may be of one size
            assert error.field == "name"
            assert any(f"of {4 * count} bytes in all" in str(error) for count in counts)
        assert error.name is None, "the caller gave none"
    for count in (SMALL, LARGE, *[SMALL] * 11):
        check(clients, count, wire)


@WIRES
def test_ranks_that_disagree_on_what_is_exact_are_named(job, wire):
    clients = job(2, wire_dtype=wire, timeout=3)
    as_sent = {"bf16": "bfloat16", "int8": "block8", "fp8_e4m3": "block8_e4m3"}[wire]
    for name, said in ((None, {"float32", as_sent}), ("x", {True, False})):
        works = [c.all_reduce(values(0, SMALL), name=name, exact=c.rank == 0) for c in clients]
        for error in errors_of(works, within_s=2):
            assert isinstance(error, MismatchError)
            assert error.field == ("dtype" if name is None else "exact")
            assert {error.expected, error.got} == said
    check(clients, SMALL, wire)


def test_a_work_ends_when_all_its_pieces_have(job):
    clients = job(2, wire_dtype="bf16")
    work = clients[0].all_reduce(values(0, LARGE), timeout=0.3)
    (call,) = {operation.ended.func.__self__ for operation in open_at(clients[0])}
    assert len(call.pieces) == len(casting.PIECES)
    with pytest.raises(ReductionTimeout) as error:
        work.wait(10)
    assert error.value.name is None, "the caller gave none"
    assert not call.pieces
    works = [clients[1].all_reduce(values(0, LARGE), timeout=0.3)]
    errors_of(works, within_s=10)  # catches up: its rank 0 has failed
    check(clients, SMALL)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_pieces_are_cast_when_those_before_have_ended(job, wire):
    """Casts leave the processor to the pieces that travel; later calls follow all pieces."""
    clients = job(2, wire_dtype=wire)
    check(clients, SMALL, wire)
    large = [values(rank, LARGE) for rank in range(2)]
    small = [values(rank, SMALL) for rank in range(2)]
    expected = [oracle(given, wire, ReduceOp.SUM).tobytes() for given in (large, small)]
    works = [clients[0].all_reduce(given[0], "sum") for given in (large, small)]
    waiting = [piece for piece in open_at(clients[0]) if piece.fill is not None]
    assert len(waiting) == len(casting.PIECES) - AHEAD
    assert all(piece.sequence < 0 for piece in open_at(clients[0])[AHEAD:])
    works += [clients[1].all_reduce(given[1], "sum") for given in (large, small)]
    assert [work.wait(20).tobytes() for work in works] == 2 * expected


def test_callers_of_other_calls_do_not_disturb_pieces_that_wait(job):
    """Threads take turns as often as they can while one looks at what is open."""
    (client,) = job(1, wire_dtype="fp16")
    busy, small = threading.Event(), np.ones(4, np.float32)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def others():
        calls = 0
        while not busy.is_set():
            works = [client.all_reduce(small.copy(), "sum") for _ in range(400)]
            calls += sum(int(work.wait(20).sum()) == 4 for work in works)
        return calls

    try:
        with ThreadPoolExecutor(2) as pool:
            counts = [pool.submit(others) for _ in range(2)]
            try:
                for _ in range(10):
                    works = [client.all_reduce(values(0, LARGE), "sum") for _ in range(2)]
                    for work in works:
                        work.wait(20)
            finally:
                busy.set()
            assert all(count.result(20) for count in counts)
    finally:
        sys.setswitchinterval(interval)


def test_a_deadline_counts_from_the_call_for_pieces_that_wait(job):
    clients = job(2, wire_dtype="int8")
    check(clients, SMALL, "int8")
    work = clients[0].all_reduce(values(0, LARGE), timeout=5.0)
    called = time.monotonic()
    pieces = open_at(clients[0])
    time.sleep(1.0)
    other = clients[1].all_reduce(values(1, LARGE))
    for each in (work, other):
        each.wait(20)
    assert max(piece.deadline for piece in pieces) < called + 5.5


def test_a_shutdown_between_two_pieces_ends_the_call(job):
    (client,) = job(1, wire_dtype="bf16")
    flat, count = inside.flat(client), []
    submit = flat.submit

    def stop_after_three(operation):
        count.append(operation)
        if len(count) == 4:
            client.shutdown()
        submit(operation)

    flat.submit = stop_after_three
    work = client.all_reduce(values(0, LARGE))
    with pytest.raises(LocalProtocolError):
        work.wait(5)
    assert len(count) == 4
    assert not open_at(client)


@pytest.mark.extended_cases("fp8")
@pytest.mark.parametrize("wire", ["none", "bf16", "int8", "fp8_e4m3"])
def test_a_weighted_mean(job, wire):
    clients = job(3, wire_dtype=wire)
    weights = [32.0, 7, np.float32(0.5)]
    for count in (1, SMALL, LARGE):
        given = [values(rank, count) for rank in range(3)]
        exact = np.average(np.float64(given), axis=0, weights=np.float64(weights))
        size = np.average(np.abs(np.float64(given)), axis=0, weights=np.float64(weights))
        bound = 2.0**-21 * size
        if count >= SMALL and wire == "bf16":
            bound = 2.0**-7 * size
        elif count >= SMALL and wire == "int8":  # half a step of contributions, one of their mean
            largest = np.average(np.abs(given).max(axis=1), weights=np.float64(weights))
            bound = 3.01 / 254 * largest
        elif count >= SMALL and wire == "fp8_e4m3":  # a sixteenth, and an eighth of the mean
            bound = 0.2 * size
        ends = reduced(clients, given, weight=weights)
        assert len({end.tobytes() for end in ends}) == 1
        assert (np.abs(ends[0] - exact) <= bound).all()


def test_float64_and_strided_data_may_be_weighted(job):
    clients = job(2)
    given = [np.arange(12.0).reshape(3, 4).T + rank for rank in range(2)]
    expected = (given[0] + 3 * given[1]) / 4
    for end in reduced(clients, given, weight=[1, 3]):
        np.testing.assert_allclose(end, expected, rtol=1e-15)


def test_a_rank_of_weight_0_has_nothing_to_say(job):
    clients = job(2)
    given = [np.float32([1.5, 2.5]), np.float32([np.nan, np.inf])]
    for end in reduced(clients, given, weight=[8, 0]):
        assert end.tolist() == [1.5, 2.5]
    works = [client.all_reduce(np.ones(2, np.float32), weight=0) for client in clients]
    for error in errors_of(works):
        assert isinstance(error, ConfigError)
        assert "weights are 0" in str(error)


def test_what_comes_after_a_weight_at_one_rank_alone_matches_again(job):
    clients = job(2, timeout="1s")
    ones = [np.ones(SMALL, np.float32) for _ in range(2)]
    with pytest.raises(MismatchError):
        reduced(clients, ones, weight=[None, 1.0])
    later = [[c.all_reduce(np.full(SMALL, k, np.float32)) for k in range(5)] for c in clients]
    for works in later:
        assert [work.wait(5)[0] for work in works] == [0, 1, 2, 3, 4]


@WIRES
def test_calls_with_names_keep_what_calls_without_keep(job, wire):
    # bf16 tensors are packed, one of them without a residual, and a cycle packs all of a step.
    clients = job(2, wire_dtype=wire, cycle_time=0.05)
    sizes = [SMALL, SMALL + 300, SMALL + 77, SMALL - 1]

    def residuals():
        every = [[np.zeros(size, np.float32) for _ in clients] for size in sizes]
        every[1] = [None, None]
        return every

    named, plain = residuals(), residuals()
    for step in range(3):
        given = [[values(10 * step + c.rank, size) for c in clients] for size in sizes]
        expected = [
            reduced(clients, [a.copy() for a in arrays], residual=kept)
            for arrays, kept in zip(given, plain, strict=True)
        ]
        works = [
            client.all_reduce(array, name=f"{at}", residual=kept)
            for at in range(len(sizes))
            for client, array, kept in zip(clients, given[at], named[at], strict=True)
        ]
        ends = [work.wait(20).tobytes() for work in works]
        assert ends == [array.tobytes() for arrays in expected for array in arrays]
    for at, (kept, others) in enumerate(zip(named, plain, strict=True)):
        for one, other in zip(kept, others, strict=True):
            assert (one is None) or (one.tobytes() == other.tobytes())
            assert (one is None) or (one.any() == (at != 3)), "of what is small nothing is cast"


ONES = np.ones(SMALL, np.float32)


@pytest.mark.parametrize(
    ("data", "given", "says"),
    [
        *(
            (ONES, {"weight": weight}, "finite number of at least 0")
            for weight in (-1, np.nan, "2")
        ),
        (ONES, {"op": "sum", "weight": 2}, "use op='mean'"),
        (np.ones(10, np.float16), {"weight": 2}, "convert the data to float32"),
        (ONES, {"weight": 2, "name": "x"}, "leave out name="),
        (ONES, {"residual": np.zeros(SMALL)}, "contiguous float32"),
        (
            ONES,
            {"residual": np.zeros(2 * SMALL, np.float32)[::2], "name": "x"},
            "contiguous float32",
        ),
        (ONES, {"residual": [0.0] * SMALL}, "residual=: "),
        (ONES, {"residual": np.broadcast_to(np.float32(0), SMALL)}, "residual=: "),
        (ONES, {"residual": np.zeros(5, np.float32)}, "its own size"),
        (ONES, {"residual": ONES.copy(), "exact": True}, "exact=True casts nothing"),
    ],
)
def test_arguments_that_are_refused(job, data, given, says):
    (client,) = job(1, job="refused", wire_dtype="bf16")
    with pytest.raises(ConfigError, match=says):
        client.all_reduce(data, **given)


def test_residuals_are_refused_where_nothing_is_cast(job):
    (client,) = job(1)
    with pytest.raises(ConfigError, match="set REDUCTION_WIRE_DTYPE=bf16"):
        client.all_reduce(ONES, residual=np.zeros(SMALL, np.float32))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wire_dtype": "int4"}, "'none', 'bf16', 'fp16', 'int8' or 'fp8_e4m3'"),
        ({"wire_dtype": "int8", "chunk_bytes": 64 * 1023}, "int8 .* multiple of that for"),
    ],
)
def test_settings_that_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        connect(rank=0, world_size=1, servers="127.0.0.1:1", **settings)


@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3"])
def test_chunks_of_a_forced_size_cut_no_block(job, wire):
    clients = job(2, wire_dtype=wire, chunk_bytes=256 * 37)
    for count in (SMALL, 100_001):
        check(clients, count, wire)
