"""Tensors on a device, over real reducers; the device is the tests' own (slow_device.py)."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from reducer.errors import (
    ConfigError,
    DeviceError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionTimeout,
)
from reducer.wire.constants import DType
from tests.worker_client.slow_device import SlowDevice
from worker_client import device, device_staging, staged_call
from worker_client.ddp import ReductionState
from worker_client.host_blocks import KEPT_FOR, HostBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker_client.client import Client

    Job = Callable[..., list[Client]]

PIECE = 4096


class Devices:
    """The clients' devices, in the order in which they made their first call.

    Attributes:
        before: what their streams call before each copy, from now on.
    """

    def __init__(self) -> None:
        self.opened: list[SlowDevice] = []
        self.before: Callable[[str, int], None] = lambda _way, _number: time.sleep(0.001)

    def open(self, of: torch.device) -> SlowDevice:
        assert of.type == "cpu"
        self.opened.append(SlowDevice(self._before))
        return self.opened[-1]

    def _before(self, way: str, number: int) -> None:
        self.before(way, number)  # what it is then


class Gate:
    """Lets copies of one way pass from a certain number on only when it is opened."""

    def __init__(self, way: str, number: int = 0) -> None:
        self._way, self._number = way, number
        self._open = threading.Event()

    def __call__(self, way: str, number: int) -> None:
        if way == self._way and number >= self._number:
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Torch's tensors are on a slow device, and their pieces are small."""
    made = Devices()
    monkeypatch.setattr(device, "is_on_device", lambda data: isinstance(data, torch.Tensor))
    monkeypatch.setattr(device, "open_device", made.open)
    monkeypatch.setattr(staged_call, "PIECE_BYTES", PIECE)
    yield made
    for one in made.opened:
        one.close()


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def reduce_all(clients: list[Client], tensors: list[Any], **arguments: Any) -> None:
    works = [
        client.all_reduce(tensor, **arguments)
        for client, tensor in zip(clients, tensors, strict=True)
    ]
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(20) is tensor


# -- results ------------------------------------------------------------------------------------

SIZES = [0, 1, 1024, 1025, 2048, 10_001]


@pytest.mark.parametrize("count", SIZES)
def test_sizes(job: Job, devices: Devices, count: int) -> None:
    ones = [torch.randn(count) for _ in range(2)]
    expected = ones[0] + ones[1]
    clients = job(2)
    reduce_all(clients, ones, op="sum")
    assert all(torch.equal(one, expected) for one in ones)
    assert [client.bytes_reduced for client in clients] == [4 * count] * 2


@pytest.mark.parametrize("dtype", [getattr(torch, one.name.lower()) for one in DType], ids=str)
def test_dtypes(job: Job, devices: Devices, dtype: torch.dtype) -> None:
    ones = [torch.randint(0, 50, (3000,)).to(dtype) for _ in range(2)]
    expected = ones[0] + ones[1]
    reduce_all(job(2), ones, op="sum")
    assert all(torch.equal(one, expected) for one in ones)


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[1:70],
        lambda whole: whole.t(),
        lambda whole: whole[:, 3],
        lambda whole: whole[::2, 1:].unsqueeze(1),
        lambda whole: torch.view_as_complex(whole.view(80, 50, 2)).conj().imag,
    ],
    ids=["part", "transposed", "column", "strided", "negated"],
)
def test_views_and_nothing_beside_them(
    job: Job, devices: Devices, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    wholes = [torch.randn(80, 100) for _ in range(2)]
    expected = [whole.clone() for whole in wholes]
    total = (view(wholes[0]) + view(wholes[1])).clone()
    for whole in expected:
        view(whole).copy_(total)
    reduce_all(job(2), [view(whole) for whole in wholes], op="sum")
    for whole, one in zip(wholes, expected, strict=True):
        assert torch.equal(whole, one)


def test_a_parameter_stays_a_leaf(job: Job, devices: Devices) -> None:
    leaf = torch.nn.Parameter(torch.ones(40, 50))
    reduce_all(job(1), [leaf], op="sum")
    assert leaf.is_leaf
    assert leaf.grad_fn is None


def test_what_is_refused(job: Job, devices: Devices) -> None:
    (client,) = job(1)
    for refused, why in [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(1).expand(3), "share memory"),
        (torch.ones(3, dtype=torch.int16), "int16 cannot be reduced"),
        (torch.ones(3, dtype=torch.int32), "mean of int32"),
        (torch.ones(3, device="meta"), "on meta"),
    ]:
        with pytest.raises(ConfigError, match=why):
            client.all_reduce(refused)
    reduce_all([client], [torch.ones(3)])  # the next one is in order


def test_ranks_that_go_on_without_others_may_have_devices(job: Job, devices: Devices) -> None:
    clients = job(3, on_rank_lost="continue")
    ones = [torch.full((5000,), float(rank)) for rank in range(3)]
    reduce_all(clients, ones, op="sum")
    clients[2].shutdown()
    ones = [torch.full((5000,), float(rank)) for rank in range(2)]
    reduce_all(clients[:2], ones, op="sum")
    assert all(torch.equal(one, torch.full((5000,), 1.0)) for one in ones)


def test_a_name_is_matched_in_any_order(job: Job, devices: Devices) -> None:
    clients = job(2)
    ones = [torch.full((5000,), float(rank)) for rank in range(2)]
    others = [torch.ones(10), torch.ones(10)]
    works = [clients[0].all_reduce(ones[0], "sum", name="x")]
    works += [client.all_reduce(one, name="y") for client, one in zip(clients, others, strict=True)]
    works += [clients[1].all_reduce(ones[1], "sum", name="x")]
    for work in works:
        work.wait(20)
    assert all(torch.equal(one, torch.full((5000,), 1.0)) for one in ones)


def test_the_hooks_future(job: Job, devices: Devices) -> None:
    ones = [torch.full((5000,), float(rank)) for rank in range(2)]
    states = [ReductionState(client) for client in job(2)]
    futures = [state.start(one) for state, one in zip(states, ones, strict=True)]
    for future in futures:
        assert torch.equal(future.wait(), torch.full((5000,), 0.5))


# -- overlap and order --------------------------------------------------------------------------


def test_first_pieces_are_reduced_while_the_last_is_still_copied(
    job: Job, devices: Devices
) -> None:
    gate = devices.before = Gate("to_host", 4)  # both devices make four of five copies
    ones = [torch.ones(5 * 1024) for _ in range(2)]
    clients = job(2)
    works = [client.all_reduce(one, "sum") for client, one in zip(clients, ones, strict=True)]
    eventually(lambda: all(one.made("to_device") == 4 for one in devices.opened))
    assert [client.bytes_reduced for client in clients] == [4 * PIECE] * 2
    assert [one.made("to_host") for one in devices.opened] == [4, 4]
    assert not any(work.done() for work in works)
    gate.open()
    for work, one in zip(works, ones, strict=True):
        work.wait(20)
        assert torch.equal(one, torch.full_like(one, 2.0))


def test_copies_follow_what_the_callers_stream_has_to_do(job: Job, devices: Devices) -> None:
    (client,) = job(1)
    reduce_all([client], [torch.ones(1)])
    late = torch.zeros(3000)
    devices.opened[0].compute.do(lambda: (time.sleep(0.1), late.fill_(7.0))[0])
    client.all_reduce(late, "sum").wait(20)
    assert torch.equal(late, torch.full_like(late, 7.0))


def test_asking_for_it_does_not_wait(job: Job, devices: Devices) -> None:
    gate = devices.before = Gate("to_host")
    (client,) = job(1)
    works = [client.all_reduce(torch.ones(3000), "sum") for _ in range(20)]
    assert devices.opened[0].made("to_host") == 0
    with pytest.raises(ReductionTimeout, match="of 12000 bytes is still in progress"):
        works[0].wait(0.01)
    gate.open()
    for work in works:
        work.wait(20)


def test_host_memory_waits_for_its_turn(job: Job, devices: Devices) -> None:
    gate = Gate("to_host")
    first = threading.Lock()
    # One rank's copies are held up, the other's are not.
    devices.before = lambda way, number: gate(way, number) if first.acquire(False) else None
    clients = job(2)
    arrays = [np.ones(3), np.ones(3)]
    works = []
    for client, array in zip(clients, arrays, strict=True):
        works.append(client.all_reduce(torch.ones(3000)))
        works.append(client.all_reduce(array, "sum"))
    time.sleep(0.1)
    assert not any(work.done() for work in works)
    gate.open()
    for work in works:
        work.wait(20)
    assert [array.tolist() for array in arrays] == [[2.0] * 3] * 2


def test_many_calls_of_both_kinds_over_devices_of_changing_speed(
    job: Job, devices: Devices
) -> None:
    dice = random.Random(7)
    devices.before = lambda _way, _number: time.sleep(dice.choice([0, 0, 0, 0.002]))
    calls = [(dice.choice([1, 900, 1500, 5000]), dice.random() < 0.7) for _ in range(60)]

    def run(client: Client) -> list[Any]:
        given = []
        for number, (count, staged) in enumerate(calls):
            one: Any = torch.arange(count, dtype=torch.float32) + number
            if not staged:
                one = one.numpy()
            given.append((client.all_reduce(one, "sum"), one))
        return [work.wait(30) for work, _ in given]

    clients = job(2)
    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(run, clients):
            for number, ((count, _), one) in enumerate(zip(calls, results, strict=True)):
                expected = 2 * (torch.arange(count, dtype=torch.float32) + number)
                assert torch.equal(torch.as_tensor(one), expected), number


# -- page-locked memory -------------------------------------------------------------------------


def test_blocks_are_used_again_when_the_result_is_back(job: Job, devices: Devices) -> None:
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
    assert one.sum() == 3000
    assert other.sum() == 6000


def blocks_of(client: Client) -> HostBlocks:
    ((_, blocks),) = client._staging._devices.values()
    return blocks


def test_blocks_that_nobody_asks_for_are_given_up() -> None:
    blocks = HostBlocks(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    large, small = blocks.take(1000), blocks.take(10)
    assert (blocks.used_bytes, blocks.idle_bytes) == (1010, 0)
    blocks.give_back(large)
    blocks.give_back(small)
    assert (blocks.used_bytes, blocks.idle_bytes) == (0, 1010)
    for _ in range(KEPT_FOR):
        assert blocks.take(10) is small
        blocks.give_back(small)
    assert blocks.take(1000) is large
    blocks.give_back(large)
    for _ in range(KEPT_FOR + 1):
        blocks.give_back(blocks.take(10))
    assert (blocks.used_bytes, blocks.idle_bytes) == (0, 10)


def test_no_page_locked_memory_is_left(
    job: Job, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SlowDevice, nbytes: int) -> torch.Tensor:
        raise DeviceError("out of memory", device="slow:0")

    (client,) = job(1)
    monkeypatch.setattr(SlowDevice, "pinned", full)
    with pytest.raises(DeviceError, match="out of memory"):
        client.all_reduce(torch.ones(3))
    assert blocks_of(client).used_bytes == 0
    with pytest.raises(DeviceError):  # other ranks may have made that call
        client.all_reduce(np.ones(3))


@pytest.mark.parametrize("nbytes", [0, 1, 64, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE + 8])
def test_pieces_cover_the_whole(devices: Devices, nbytes: int) -> None:
    pieces = staged_call.cut(nbytes)
    assert len(pieces) == max(1, -(-nbytes // PIECE))
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == nbytes
    assert all(end - start <= PIECE and start % 64 == 0 for start, end in pieces)


# -- errors -------------------------------------------------------------------------------------


def test_ranks_that_disagree_on_the_whole_size(job: Job, devices: Devices) -> None:
    gates = [Gate("to_host", 2), Gate("to_host", 2)]
    devices.before = gates[0]
    clients = job(2)
    # Three pieces each, of which the first are equal; no rank may have its tensor back before all
    # copies are made.
    ones = [torch.ones(2 * 1024 + 960), torch.ones(2 * 1024 + 976)]
    works = [client.all_reduce(one) for client, one in zip(clients, ones, strict=True)]
    time.sleep(0.3)
    assert not any(work.done() for work in works)
    gates[0].open()
    for work in works:
        with pytest.raises(MismatchError, match=r"of 12\d+ bytes in all") as caught:
            work.wait(20)
        assert caught.value.field == "name"
    assert [blocks_of(client).used_bytes for client in clients] == [0, 0]
    reduce_all(clients, [torch.ones(5000), torch.ones(5000)])  # as many pieces: still in step


def test_of_one_piece_the_size_itself_is_compared(job: Job, devices: Devices) -> None:
    works = [
        client.all_reduce(torch.ones(count)) for client, count in zip(job(2), (9, 10), strict=True)
    ]
    for work in works:
        with pytest.raises(MismatchError) as caught:
            work.wait(20)
        assert caught.value.field == "total_bytes"
        assert {caught.value.expected, caught.value.got} == {36, 40}


def test_a_device_that_fails_on_the_way_to_the_host(job: Job, devices: Devices) -> None:
    fails, gate = threading.Lock(), Gate("to_host")

    def before(way: str, number: int) -> None:
        gate(way, number)
        if (way, number) == ("to_host", 1) and fails.acquire(False):  # one of the two devices
            raise DeviceError("an illegal memory access", device="slow:0")

    devices.before = before
    clients = job(2)
    works = [client.all_reduce(torch.ones(3000)) for client in clients]
    later = [client.all_reduce(np.ones(3)) for client in clients]
    gate.open()
    eventually(lambda: any(work.done() for work in works))
    failed = [work.done() for work in works].index(True)
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        works[failed].wait(20)
    assert caught.value.device == "slow:0"
    with pytest.raises(DeviceError):  # it would be summed up with the others' second piece
        later[failed].wait(20)
    for data in (torch.ones(3), np.ones(3)):
        with pytest.raises(DeviceError):
            clients[failed].all_reduce(data)
    clients[failed].shutdown()
    for work in (works[1 - failed], later[1 - failed]):
        with pytest.raises(RankLostError):
            work.wait(20)


def test_a_device_that_fails_on_the_way_back(job: Job, devices: Devices) -> None:
    def before(way: str, number: int) -> None:
        if way == "to_device" and number == 1:
            devices.before = lambda _way, _number: None
            raise DeviceError("an illegal memory access", device="slow:0")

    devices.before = before
    (client,) = job(1)
    with pytest.raises(DeviceError, match="illegal memory access"):
        client.all_reduce(torch.ones(2000), "sum").wait(20)
    reduce_all([client], [torch.ones(3000)])  # the contribution was made, so the order is kept


def test_an_error_of_one_call_is_not_that_of_the_next(job: Job, devices: Devices) -> None:
    clients = job(2)
    work = clients[0].all_reduce(torch.ones(5000), timeout=0.2)
    with pytest.raises(ReductionTimeout) as caught:
        work.wait(20)
    assert caught.value.missing == (1,)
    assert blocks_of(clients[0]).used_bytes == 0
    with pytest.raises(ReductionTimeout):
        clients[1].all_reduce(torch.ones(5000)).wait(20)
    reduce_all(clients, [torch.ones(5000), torch.ones(5000)])


# -- threads ------------------------------------------------------------------------------------


def test_callbacks(job: Job, devices: Devices) -> None:
    clients = job(2)
    seen: list[Any] = []

    def called(future: Any) -> None:
        seen.append(devices.opened[0].is_returning)
        try:
            late.wait(1)
        except LocalProtocolError as error:
            seen.append(str(error))
        seen.append(clients[0].all_reduce(np.ones(3), "sum"))  # which it may ask for

    work = clients[0].all_reduce(torch.ones(3000))
    late = clients[0].all_reduce(torch.ones(3000))
    work.future().add_done_callback(called)
    other = [clients[1].all_reduce(torch.ones(3000)) for _ in range(2)]
    other.append(clients[1].all_reduce(np.ones(3), "sum"))
    eventually(lambda: len(seen) == 3)
    assert seen[0] is True
    assert "would last for ever" in seen[1]
    assert seen[2].wait(20).tolist() == [2.0] * 3
    for one in (work, late, *other):
        one.wait(20)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_shut_down_in_a_callback(job: Job, devices: Devices, kind: str) -> None:
    (client,) = job(1)
    reduce_all([client], [torch.ones(1)])
    gate = devices.before = Gate("to_device", 1)
    late = client.all_reduce(torch.ones(3000))
    data = np.ones(3) if kind == "host" else torch.ones(3)
    work = client.all_reduce(data)
    ended = threading.Event()
    work.future().add_done_callback(lambda _: (client.shutdown(), ended.set()))
    if kind == "device":
        gate.open()
    assert ended.wait(4)  # and not after the time for which others wait
    gate.open()
    work.wait(20)
    eventually(late.done)
    eventually(lambda: not any(thread.is_alive() for thread in client._staging._threads))


def test_shut_down_in_a_callback_while_others_wait_for_ranks(job: Job, devices: Devices) -> None:
    clients = job(2)

    def leave(_: Any) -> None:
        eventually(lambda: clients[0]._staging.in_order)
        clients[0].shutdown()
        eventually(lambda: not clients[0]._staging._threads[0].is_alive())
        time.sleep(0.05)  # the other thread has heard of it, before the driver ends anything

    first = clients[0].all_reduce(np.ones(3))
    first.future().add_done_callback(leave)
    late = clients[0].all_reduce(torch.ones(3000))
    threads = clients[0]._staging._threads
    clients[1].all_reduce(np.ones(3))
    with pytest.raises(LocalProtocolError, match="shut down"):
        late.wait(20)
    eventually(lambda: not any(thread.is_alive() for thread in threads))


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_shut_down_while_copies_are_on_their_way(job: Job, devices: Devices, way: str) -> None:
    gate = devices.before = Gate(way, 1)
    (client,) = job(1)
    work = client.all_reduce(torch.ones(3000))
    eventually(lambda: devices.opened[0].made(way) == 1)
    if way == "to_device":
        eventually(lambda: client.bytes_reduced == 12_000)  # and so all three were asked for
    threading.Timer(0.2, gate.open).start()
    begun = time.monotonic()
    client.shutdown()
    assert time.monotonic() - begun > 0.1
    assert work.done()
    assert blocks_of(client).used_bytes == 0
    assert not any(thread.is_alive() for thread in client._staging._threads)
    if way == "to_host":
        with pytest.raises(LocalProtocolError, match="shut down"):
            work.wait(20)
    with pytest.raises(LocalProtocolError, match="shut down"):
        client.all_reduce(torch.ones(3))


def test_a_device_that_hangs_is_not_waited_for(
    job: Job, devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_staging, "STOP_S", 0.1)
    gate = devices.before = Gate("to_host")
    (client,) = job(1)
    work = client.all_reduce(torch.ones(3000))
    client.shutdown()
    assert not work.done()
    assert "a device has not made all copies" in caplog.text
    gate.open()
    with pytest.raises(LocalProtocolError):
        work.wait(20)


def test_without_devices_there_are_no_threads(job: Job) -> None:
    (client,) = job(1)
    client.all_reduce(torch.ones(3)).wait(20)
    assert not client._staging._threads
