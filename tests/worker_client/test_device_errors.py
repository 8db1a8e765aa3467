"""Devices that fail, calls that disagree, and clients that end while copies are made."""

import threading
import time

import numpy as np
import pytest
import torch

from reducer.errors import (
    DeviceError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
)
from tests import inside
from tests.waits import eventually
from tests.worker_client.slow_device import Gate, SlowDevice, reduce_all, staging_threads
from worker_client.runtime import service_thread


def test_ranks_that_disagree_on_the_whole_size(job, devices):
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
    assert [inside.blocks(client).used_bytes for client in clients] == [0, 0]
    reduce_all(clients, [torch.ones(5000), torch.ones(5000)])  # as many pieces: still in step


def test_a_device_that_fails_on_the_way_to_the_host(job, devices):
    fails, gate = threading.Lock(), Gate("to_host")

    def before(way, number):
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


def test_a_device_that_fails_on_the_way_back(job, devices):
    def before(way, number):
        if way == "to_device" and number == 1:
            devices.before = lambda _way, _number: None
            raise DeviceError("an illegal memory access", device="slow:0")

    devices.before = before
    (client,) = job(1)
    with pytest.raises(DeviceError, match="illegal memory access"):
        client.all_reduce(torch.ones(2000), "sum").wait(20)
    reduce_all([client], [torch.ones(3000)])  # the contribution was made, so the order is kept


def test_no_page_locked_memory_is_left(job, devices, monkeypatch):
    def full(self, nbytes):
        raise DeviceError("out of memory", device="slow:0")

    (client,) = job(1)
    monkeypatch.setattr(SlowDevice, "pinned", full)
    with pytest.raises(DeviceError, match="out of memory"):
        client.all_reduce(torch.ones(3))
    assert inside.blocks(client).used_bytes == 0
    with pytest.raises(DeviceError):  # other ranks may have made that call
        client.all_reduce(np.ones(3))


def test_callbacks(job, devices):
    clients = job(2)
    seen = []

    def called(future):
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
def test_shut_down_in_a_callback(job, devices, kind):
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
    eventually(lambda: not staging_threads())


def test_shut_down_in_a_callback_while_others_wait_for_ranks(job, devices):
    clients = job(2)

    def leave(_):
        core = inside.flat(clients[0]).core
        eventually(lambda: len(core.open) == 3)  # pieces of 4096 bytes, which were submitted
        clients[0].shutdown()
        eventually(lambda: staging_threads() == {"to-device"})
        time.sleep(0.05)  # the other thread has heard of it, before the driver ends anything

    first = clients[0].all_reduce(np.ones(3))
    first.future().add_done_callback(leave)
    late = clients[0].all_reduce(torch.ones(3000))
    clients[1].all_reduce(np.ones(3))
    with pytest.raises(LocalProtocolError, match="shut down"):
        late.wait(20)
    eventually(lambda: not staging_threads())


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_shut_down_while_copies_are_on_their_way(job, devices, way):
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
    assert inside.blocks(client).used_bytes == 0
    assert not staging_threads()
    if way == "to_host":
        with pytest.raises(LocalProtocolError, match="shut down"):
            work.wait(20)
    with pytest.raises(LocalProtocolError, match="shut down"):
        client.all_reduce(torch.ones(3))


def test_a_device_that_hangs_is_not_waited_for(job, devices, monkeypatch, caplog):
    monkeypatch.setattr(service_thread, "STOP_S", 0.1)
    gate = devices.before = Gate("to_host")
    (client,) = job(1)
    work = client.all_reduce(torch.ones(3000))
    client.shutdown()
    assert not work.done()
    assert "a device has not made all copies" in caplog.text
    gate.open()
    with pytest.raises(LocalProtocolError):
        work.wait(20)
