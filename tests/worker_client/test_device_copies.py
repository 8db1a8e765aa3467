"""Tensors on a device, over real reducers; mostly the tests' own (slow_device.py)."""

import math
import random
import threading
import time

import numpy as np
import pytest
import torch

from harness import block8_oracle
from reducer.errors import ConfigError, ReductionTimeout
from tests import inside
from tests.waits import eventually
from tests.worker_client.buckets import Bucket
from tests.worker_client.slow_device import (
    DTYPES,
    PIECE,
    VIEWS,
    Gate,
    reduce_all,
)
from tests.worker_client.waits import at_all
from worker_client.collectives import broadcast
from worker_client.communicators import casting
from worker_client.ddp import ReductionState
from worker_client.staging import split_call


@pytest.fixture
def place(device_of_any_kind):
    """Puts a tensor on the device."""
    return device_of_any_kind.place


@pytest.mark.parametrize(("pieces", "more"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (10, -16)])
def test_sizes(job, place, pieces, more):
    count = pieces * split_call.PIECE_BYTES // 4 + more
    ones = [place(torch.randn(count)) for _ in range(2)]
    expected = ones[0] + ones[1]
    clients = job(2)
    reduce_all(clients, ones, op="sum")
    assert all(torch.equal(one, expected) for one in ones)
    assert [client.bytes_reduced for client in clients] == [4 * count] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(job, place, dtype):
    given = [torch.randint(0, 50, (3000,)).to(dtype) for _ in range(2)]
    ones = [place(one.clone()) for one in given]
    reduce_all(job(2), ones, op="sum")
    assert all(torch.equal(one.cpu(), given[0] + given[1]) for one in ones)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_and_nothing_beside_them(job, place, view):
    wholes = [place(torch.randn(80, 100)) for _ in range(2)]
    expected = [whole.clone() for whole in wholes]
    total = (view(wholes[0]) + view(wholes[1])).clone()
    for whole in expected:
        view(whole).copy_(total)
    reduce_all(job(2), [view(whole) for whole in wholes], op="sum")
    assert all(map(torch.equal, wholes, expected))


def test_broadcasts_and_the_hooks_futures(job, place):
    clients = job(2)
    ones = [place(torch.full((50, 60), float(rank))).t() for rank in range(2)]
    at_all(clients, lambda client: broadcast(client, ones[client.rank], root=1))
    assert all((one == 1.0).all() for one in ones)
    ones = [place(torch.full((5000,), float(rank))) for rank in range(2)]
    states = [ReductionState(client) for client in clients]
    futures = [state.reduce(Bucket(one)) for state, one in zip(states, ones, strict=True)]
    for future in futures:
        assert (future.then(lambda done: done.value() * 2).wait() == 1.0).all()


def test_what_is_refused(job, devices):
    (client,) = job(1, wire_dtype="int8")
    one, kept = torch.nn.Parameter(torch.ones(5000)), np.zeros(5000, np.float32)
    for refused, options, why in [
        (torch.eye(3).to_sparse(), {}, "sparse"),
        (torch.ones(1).expand(3), {}, "share memory"),
        (torch.ones(3, dtype=torch.int16), {}, "int16 cannot be reduced"),
        (torch.ones(3, dtype=torch.int32), {}, "mean of int32"),
        (one, {"residual": kept[1:]}, "of its own size"),
        (one, {"residual": kept.astype(np.float64)}, "in host memory whatever the data are in"),
        (one, {"residual": kept, "exact": True}, "exact=True casts nothing"),
    ]:
        with pytest.raises(ConfigError, match=why):
            client.all_reduce(refused, **options)
    reduce_all([client], [one], residual=kept)  # the next one is in order
    assert one.is_leaf
    assert one.grad_fn is None


def test_ranks_that_go_on_without_others_may_have_devices(job, devices):
    clients = job(3, on_rank_lost="continue")
    reduce_all(clients, [torch.ones(5000) for _ in clients], op="sum")
    clients[2].shutdown()
    ones = [torch.full((5000,), float(rank)) for rank in range(2)]
    reduce_all(clients[:2], ones, op="sum")
    assert all(torch.equal(one, torch.full((5000,), 1.0)) for one in ones)


def test_a_name_is_matched_in_any_order(job, devices):
    clients = job(2)
    ones = [torch.full((5000,), float(rank)) for rank in range(2)]
    others = [torch.ones(10), torch.ones(10)]
    works = [clients[0].all_reduce(ones[0], "sum", name="x")]
    works += [client.all_reduce(one, name="y") for client, one in zip(clients, others, strict=True)]
    works += [clients[1].all_reduce(ones[1], "sum", name="x")]
    for work in works:
        work.wait(20)
    assert all(torch.equal(one, torch.full((5000,), 1.0)) for one in ones)


def test_blocks_are_used_again_when_the_result_is_back(job, devices):
    (client,) = job(1)
    for _ in range(5):
        reduce_all([client], [torch.ones(3000)])
        reduce_all([client], [torch.ones(1500, dtype=torch.float64)])  # as many bytes
    assert devices.opened[0].blocks == 1
    gate = devices.before = Gate("to_device")
    one, other = torch.full((3000,), 1.0), torch.full((3000,), 2.0)
    works = [client.all_reduce(one, "sum")]
    eventually(lambda: client.bytes_reduced == 11 * 12_000)  # its results are in the block
    works.append(client.all_reduce(other, "sum"))
    assert devices.opened[0].blocks == 2
    eventually(lambda: client.bytes_reduced == 12 * 12_000)
    assert not works[0].done()
    gate.open()
    for work in works:
        work.wait(20)
    assert (one.sum(), other.sum()) == (3000, 6000)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("nbytes", [0, 64, PIECE - 1, PIECE + 4, 10 * PIECE + 8, 1000 * PIECE])
def test_pieces_cover_the_whole(devices, nbytes, rounded):
    pieces = split_call.cut(nbytes, rounded=rounded)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == nbytes
    assert len(pieces) <= 126
    assert all(start % (math.lcm(64, 252 * 4) if rounded else 64) == 0 for start, _ in pieces)
    if nbytes < 126 * PIECE and not rounded:  # which are whole blocks
        assert len(pieces) == max(1, -(-nbytes // PIECE))
        assert all(end - start <= PIECE for start, end in pieces)


@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("large_bytes", [casting.LARGE_BYTES, 1], ids=["", "cut no further"])
def test_what_is_rounded_has_the_bits_that_it_would_have_in_host_memory(
    job, place, monkeypatch, wire, large_bytes
):
    monkeypatch.setattr(casting, "LARGE_BYTES", large_bytes)
    count = max(10_001, 3 * split_call.PIECE_BYTES // 4 + 1)  # several pieces, no whole blocks
    given = [torch.randn(count).numpy() for _ in range(2)]
    ones = [place(torch.from_numpy(one.copy())) for one in given]
    kept = [np.zeros(count, np.float32) for _ in range(2)]
    clients = job(2, wire_dtype=wire)
    works = [
        client.all_reduce(one, residual=residual)
        for client, one, residual in zip(clients, ones, kept, strict=True)
    ]
    for work in works:
        work.wait(20)
    expected = block8_oracle.reduced(given, wire, mean=True)
    for one, residual, values in zip(ones, kept, given, strict=True):
        assert one.cpu().numpy().tobytes() == expected.tobytes()
        sent = block8_oracle.arrives(block8_oracle.travels(values, wire), count, wire)
        assert np.array_equal(residual, values - sent)
    assert [client.bytes_reduced for client in clients] == [4 * count] * 2


def test_a_call_has_as_many_pieces_whether_they_are_rounded_or_not(job, devices, monkeypatch):
    monkeypatch.setattr(casting, "LARGE_BYTES", 1)
    ones = [torch.full((300 * PIECE // 4,), 1.0 + rank) for rank in range(2)]
    clients = job(2, wire_dtype="bf16")
    assert all(client.rounds(one) for client, one in zip(clients, ones, strict=True))
    reduce_all(clients, ones, op="sum")
    assert all(torch.equal(one, torch.full_like(one, 3.0)) for one in ones)


def test_what_stays_exact(job, devices):
    clients = job(2, wire_dtype="int8")
    small, large = torch.randn(4095), torch.randn(4096)
    for given, options in [(small, {}), (large, {"exact": True})]:
        ones = [given.clone() for _ in clients]
        reduce_all(clients, ones, op="sum", **options)
        assert all(torch.equal(one, given + given) for one in ones)


def test_all_pieces_are_on_the_way_once_they_are_in_host_memory(job, devices):
    clients = job(2)
    tensors = [torch.ones(PIECE * 10) for _ in clients]
    works = [clients[0].all_reduce(tensors[0], "sum")]
    flat = inside.flat(clients[0])
    eventually(lambda: flat.session.active >= 10)
    assert all(piece.fill is None for piece in flat.open)
    works.append(clients[1].all_reduce(tensors[1], "sum"))
    for work in works:
        work.wait(20)
    assert all((tensor == 2).all() for tensor in tensors)


def test_first_pieces_are_reduced_while_the_last_is_still_copied(job, devices):
    gate = devices.before = Gate("to_host", 4)  # both devices make four of five copies
    ones = [torch.ones(5 * 1024) for _ in range(2)]
    clients = job(2)
    works = [client.all_reduce(one, "sum") for client, one in zip(clients, ones, strict=True)]
    with pytest.raises(ReductionTimeout, match=r"\(20480 bytes of FLOAT32\) is still in progress"):
        works[0].wait(0.01)
    eventually(lambda: all(one.made("to_device") == 4 for one in devices.opened))
    assert [client.bytes_reduced for client in clients] == [4 * PIECE] * 2
    assert [one.made("to_host") for one in devices.opened] == [4, 4]
    assert not any(work.done() for work in works)
    gate.open()
    for work, one in zip(works, ones, strict=True):
        work.wait(20)
        assert torch.equal(one, torch.full_like(one, 2.0))


def test_copies_follow_what_the_callers_stream_has_to_do(job, devices):
    (client,) = job(1)
    reduce_all([client], [torch.ones(1)])
    late = torch.zeros(3000)
    devices.opened[0].compute.do(lambda: (time.sleep(0.1), late.fill_(7.0))[0])
    client.all_reduce(late, "sum").wait(20)
    assert torch.equal(late, torch.full_like(late, 7.0))


def test_host_memory_waits_for_its_turn_and_is_weighted_once(job, devices):
    gate = Gate("to_host")
    first = threading.Lock()
    # One rank's copies are held up, the other's are not.
    devices.before = lambda way, number: gate(way, number) if first.acquire(False) else None
    arrays = [np.full(3, 1.0), np.full(3, 4.0)]
    works = []
    for weight, client, array in zip((1, 2), job(2), arrays, strict=True):
        works.append(client.all_reduce(torch.ones(3000)))
        works.append(client.all_reduce(array, weight=weight))
    time.sleep(0.1)
    assert not any(work.done() for work in works)
    gate.open()
    for work in works:
        work.wait(20)
    assert [array.tolist() for array in arrays] == [[3.0] * 3] * 2


def test_many_calls_of_both_kinds_over_devices_of_changing_speed(job, device_of_any_kind):
    dice = random.Random(7)
    device_of_any_kind.before = lambda _way, _number: time.sleep(dice.choice([0, 0, 0, 0.002]))
    calls = [(dice.choice([1, 900, 1500, 5000]), dice.random() < 0.7) for _ in range(60)]

    def run(client):
        given = []
        for number, (count, staged) in enumerate(calls):
            one = torch.arange(count, dtype=torch.float32) + number
            one = device_of_any_kind.place(one) if staged else one.numpy()
            given.append((client.all_reduce(one, "sum"), one))
        return [work.wait(30) for work, _ in given]

    for results in at_all(job(2), run):
        for number, ((count, _), one) in enumerate(zip(calls, results, strict=True)):
            expected = 2 * (torch.arange(count, dtype=torch.float32) + number)
            assert torch.equal(torch.as_tensor(one).cpu(), expected), number
