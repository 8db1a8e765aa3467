"""Buffers of more than 4 GiB and 2^31 elements, and jobs of more ranks than a word has bits."""

import mmap

import pytest

from reducer.errors import RankLostError
from reducer.wire.constants import MAX_CHUNK_BYTES, DType, ReduceOp
from tests.engine.driven import operation
from tests.engine.network import connected
from tests.engine.transcripts import transcripts
from tests.worker_client.flights import answer, header_of, opened, submit
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation

ELEMENTS = (1 << 31) + 1
LARGE = [pytest.param(ELEMENTS, id="2^31+1 elements"), pytest.param(5 << 30, id="5 GiB")]


@pytest.mark.parametrize("total", LARGE)
def test_a_flight_with_a_large_buffer(total, tmp_path):
    """Only the last chunks are sent: what of a sparse file is not touched takes no memory."""
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(total)
        memory = mmap.mmap(file.fileno(), total)
    memory[-1:] = b"\3"
    begin = (total - 2 * MAX_CHUNK_BYTES) // 64 * 64
    flight = opened(window=4 * MAX_CHUNK_BYTES)
    flight.shut(0)
    mine = Operation(
        memoryview(memory), dtype=DType.UINT8, op=ReduceOp.SUM, timeout_s=9.0, name="it"
    )
    submit(flight, mine, [LinkShard(0, 0, begin), LinkShard(1, begin, total)], MAX_CHUNK_BYTES, 0)
    sends = flight.refill(1.0)
    headers = [header_of(send) for send in sends]
    assert [header.total_bytes for header in headers] == [total] * len(headers)
    assert headers[0].offset == begin
    assert [header.offset + header.nbytes for header in headers][-1] == total
    assert bytes(sends[-1].payload[-1:]) == b"\3"
    for send in sends:
        assert answer(flight, send) == []  # the rest is on its way
    assert memory[-1] == 252
    assert memory[begin - 64 : begin] == bytes(64)


@pytest.mark.parametrize("world_size", [64, 65, 129])
def test_a_job_of_many_ranks(implementation, world_size):
    network = connected(world_size, 2, 64, 4096, implementation)
    mine = [operation(bytes([rank % 2] * 256)) for rank in range(world_size)]
    for rank, each in enumerate(mine):
        network.submit(rank, each)
    network.deliver_all()
    for worker, each in zip(network.workers, mine, strict=True):
        assert worker.ended == {0: None}
        assert bytes(each.view) == bytes([world_size // 2] * 256)
    for rank in range(world_size - 1):
        network.submit(rank, operation(256))
    network.deliver_all()
    network.lose(world_size - 1)
    for _ in range(8):
        network.tick(1.0)
        network.deliver_all()
    for worker in network.workers[:-1]:
        assert isinstance(worker.ended[1], RankLostError)
        assert worker.ended[1].rank == world_size - 1


test_slots = transcripts("""
A slot at the end of a large buffer
    each total: (1<<31)+1 | 5<<30
    each at: 0 | ($total-5)//64*64
    0 CONTRIBUTION total_bytes=$total offset=$at dtype=DType.UINT8 wire_dtype=DType.UINT8
        payload="b'1'*64"
    1 CONTRIBUTION total_bytes=$total offset=$at dtype=DType.UINT8 wire_dtype=DType.UINT8
        payload="b'2'*64" -> 0 1 RESULT total_bytes=$total offset=$at payload="b'c'*64"
""")
