"""Page-locked memory for tensors on a device: it is used again, and given up."""

import numpy as np
import pytest
import torch

from reducer.errors import DeviceError
from tests import inside
from tests.waits import eventually
from tests.worker_client.slow_device import PIECE, Gate, SlowDevice, reduce_all
from worker_client.staging import split_call
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.device_copies import BLOCK_TURNS


def test_all_pieces_are_on_the_way_once_they_are_in_host_memory(job, devices):
    del devices
    clients = job(2)
    tensors = [torch.ones(PIECE * 10) for _ in clients]
    works = [clients[0].all_reduce(tensors[0], "sum")]
    driver = inside.communicator(clients[0]).flat
    eventually(lambda: driver.session.active >= 10)
    assert all(piece.prepare is None for piece in driver.open)
    works.append(clients[1].all_reduce(tensors[1], "sum"))
    for work in works:
        work.wait(20)
    assert all((tensor == 2).all() for tensor in tensors)


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
    assert one.sum() == 3000
    assert other.sum() == 6000


def test_blocks_that_nobody_asks_for_are_given_up():
    blocks = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), turns=BLOCK_TURNS)
    large, small = blocks.take(1000), blocks.take(10)
    assert (blocks.used_bytes, blocks.idle_bytes) == (1010, 0)
    blocks.give_back(large)
    blocks.give_back(small)
    assert (blocks.used_bytes, blocks.idle_bytes) == (0, 1010)
    for _ in range(BLOCK_TURNS):
        assert blocks.take(10) is small
        blocks.give_back(small)
    assert blocks.take(1000) is large
    blocks.give_back(large)
    for _ in range(BLOCK_TURNS + 1):
        blocks.give_back(blocks.take(10))
    assert (blocks.used_bytes, blocks.idle_bytes) == (0, 10)


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


@pytest.mark.parametrize("nbytes", [0, 1, 64, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE + 8])
def test_pieces_cover_the_whole(devices, nbytes):
    pieces = split_call.cut(nbytes, rounded=False)
    assert len(pieces) == max(1, -(-nbytes // PIECE))
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == nbytes
    assert all(end - start <= PIECE and start % 64 == 0 for start, end in pieces)


@pytest.mark.parametrize("nbytes", [PIECE + 4, 10 * PIECE + 8, 1000 * PIECE])
def test_pieces_that_are_rounded_are_whole_blocks(devices, nbytes):
    pieces = split_call.cut(nbytes, rounded=True)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == nbytes
    assert len(pieces) <= 126
    assert all(start % 64 == 0 and start % (252 * 4) == 0 for start, _ in pieces)
