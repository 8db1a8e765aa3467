"""What a worker does with the chunks and results of a link that is lost: the rules one by one."""

import pytest

from reducer.runtime.implementation import NAMES
from reducer.wire.constants import MAX_ROUNDS_AHEAD, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from tests.engine.driven import operation
from tests.worker_client.flights import (
    IDENTITY,
    answer,
    header_of,
    opened,
    submit,
    where,
)
from worker_client.protocol.flight import Carried, LinkShard
from worker_client.protocol.operation import Operation

BOTH = [LinkShard(0, 0, 128), LinkShard(1, 128, 256)]


@pytest.fixture(params=NAMES)
def impl(request):
    return request.param


@pytest.fixture
def flight(impl):
    """Two links that are open, and whose results are kept."""
    return opened(impl, keep=True)


# -- chunks ---------------------------------------------------------------------------------------


def test_a_link_that_is_shut_has_nothing_in_flight_and_expects_nothing(flight):
    submit(flight, operation(256), BOTH, 64, 3)
    sends = flight.refill(1.0)
    assert answer(flight, sends[0]) == []
    flight.shut(0)
    assert flight.stats(0).in_flight == 0
    assert flight.needs(0) == [0]
    assert not flight.waits_for(0, 0)
    assert answer(flight, sends[2]) is None
    assert flight.carried(0) == [
        Carried(0, 3, 0, home=0, number=0, done=True),
        Carried(0, 3, 64, home=0, number=1, done=False),
    ]
    flight.open(0)
    assert flight.refill(1.0) == [], "what is stranded waits to be moved"


def test_what_is_carried_is_of_one_all_reduce_or_all(flight):
    for _ in range(3):
        submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    flight.shut(0)
    assert [chunk.sequence for chunk in flight.carried(0)] == [0, 1, 2]
    assert [chunk.sequence for chunk in flight.carried(0, 1)] == [1]
    assert flight.carried(1) == []


def test_a_chunk_that_is_moved_is_sent_and_answered_elsewhere(flight):
    mine = operation(bytes(range(256)))
    submit(flight, mine, BOTH, 64, 0)
    first = flight.refill(1.0)
    flight.shut(0)
    for chunk in flight.carried(0):
        flight.move(chunk.sequence, chunk.offset, 1)
    assert flight.carried(0) == []
    assert [chunk.home for chunk in flight.carried(1)] == [0, 0, 1, 1]
    moved = flight.refill(2.0)
    assert where(moved) == [(1, 0, 0), (1, 0, 64)]
    assert bytes(moved[0].payload) == bytes(range(64))
    flight.open(0)
    assert answer(flight, first[0]) is None, "nothing of it is expected there any more"
    answers = [answer(flight, send) for send in (*moved, *first) if send.link == 1]
    assert answers == [[], [], [], [0]]
    assert bytes(mine.view) == bytes(255 - byte for byte in range(256))
    assert flight.stats(1).in_flight == 0


def test_a_chunk_may_move_again(flight):
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    flight.shut(0)
    flight.move(0, 0, 1)
    flight.refill(1.0)
    flight.shut(1)
    flight.open(0)
    flight.move(0, 0, 0)
    assert flight.stats(1).in_flight == 0
    (send,) = flight.refill(1.0)
    assert (send.link, answer(flight, send)) == (0, [0])


def test_what_is_moved_is_sent_in_the_order_of_calls(flight):
    for link in (0, 1):
        submit(flight, operation(128), [LinkShard(link, 0, 128)], 64, 0)
    flight.set_window(1, 1)
    first = flight.refill(1.0)
    assert where([send for send in first if send.link == 1]) == [(1, 1, 0)]
    flight.shut(0)
    for offset in (64, 0):
        flight.move(0, offset, 1)
    # The window is full; but what precedes all in flight may be what another rank waits for.
    (ahead,) = flight.refill(1.0)
    assert where([ahead]) == [(1, 0, 0)]
    sent = []
    waiting = [ahead, next(send for send in first if send.link == 1)]
    while waiting:
        answer(flight, waiting.pop(0))
        new = flight.refill(1.0)
        sent += where(new)
        waiting += new
    assert sent == [(1, 0, 64), (1, 1, 64)]
    assert flight.watermark == 2


def test_what_failed_is_not_carried(flight):
    submit(flight, operation(256), BOTH, 64, 0)
    flight.forget(0, 0)
    assert flight.carried(0) == []
    flight.end(0)
    assert flight.carried(1) == []
    assert flight.needs(1) == []


def test_the_buffer_is_free_at_the_end_wherever_chunks_went(flight):
    buffer = bytearray(64)
    mine = Operation(memoryview(buffer), DType.UINT8, ReduceOp.SUM, None, 1.0)
    submit(flight, mine, [LinkShard(0, 0, 64)], 64, 0)
    flight.refill(1.0)
    flight.shut(0)
    flight.move(0, 0, 1)
    (send,) = flight.refill(1.0)
    assert answer(flight, send) == [0]
    del mine, send
    buffer.append(0)
    assert flight.kept_bytes == 64


# -- results --------------------------------------------------------------------------------------


def test_a_result_is_kept_until_every_rank_has_it(flight):
    mine = operation(bytes(range(256)))
    submit(flight, mine, BOTH, 64, 5)
    for send in flight.refill(1.0):
        answer(flight, send)
    assert flight.kept_bytes == 256
    mine.view[:] = bytes(256)  # it is the caller's again
    frame, payload = flight.kept(0, 128)
    assert bytes(payload) == bytes(255 - byte for byte in range(128, 192))
    header = Header.unpack(frame)
    assert header == IDENTITY._replace(
        type=MessageType.RETAINED,
        epoch=5,
        sequence=0,
        watermark=1,
        total_bytes=256,
        offset=128,
        nbytes=64,
        dtype=DType.UINT8,
        op=ReduceOp.SUM,
        wire_dtype=DType.UINT8,
        tag=mine.tag,
    )
    assert all(chunk.done for chunk in flight.carried(0))
    flight.confirm(0)
    assert flight.kept_bytes == 256
    flight.confirm(1)
    assert (flight.kept_bytes, flight.reached) == (0, 1)
    assert flight.kept(0, 128) is None
    assert flight.carried(0) == []


def test_results_of_what_is_not_done_are_kept_too(flight):
    submit(flight, operation(256), BOTH, 64, 0)
    first, *_ = flight.refill(1.0)
    answer(flight, first)
    assert flight.kept_bytes == 64
    assert flight.kept(0, 0) is not None
    assert flight.kept(0, 64) is None
    assert flight.kept(0, 32) is None
    assert flight.kept(1, 0) is None
    flight.end(0)
    assert flight.kept_bytes == 0
    assert flight.kept(0, 0) is None


def test_nothing_is_kept_of_a_reducer_that_cannot_be_replaced(impl):
    flight = opened(impl)
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    (send,) = flight.refill(1.0)
    assert answer(flight, send) == [0]
    assert flight.kept_bytes == 0
    assert flight.kept(0, 0) is None


def test_a_result_says_what_every_rank_has(flight):
    for _ in range(3):
        submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    one, two, three = flight.refill(1.0)
    answer(flight, one)
    assert (flight.reached, flight.kept_bytes) == (0, 64)
    answer(flight, two, watermark=1)
    assert (flight.reached, flight.kept_bytes) == (1, 64)
    answer(flight, three, watermark=0)
    assert (flight.reached, flight.kept_bytes) == (1, 128), "news may be late"


def test_a_result_that_is_done_is_moved_but_not_sent(flight):
    submit(flight, operation(256), BOTH, 64, 0)
    for send in flight.refill(1.0):
        answer(flight, send)
    flight.shut(0)
    for chunk in flight.carried(0):
        assert chunk.done
        flight.move(chunk.sequence, chunk.offset, 1)
    assert flight.refill(1.0) == []
    assert flight.carried(0) == []
    assert len(flight.carried(1)) == 4
    assert flight.kept(0, 0) is not None
    flight.confirm(1)
    assert flight.kept_bytes == 0


def test_an_empty_result_is_kept(flight):
    submit(flight, operation(0), [LinkShard(0, 0, 0)], 64, 0)
    (send,) = flight.refill(1.0)
    assert answer(flight, send) == [0]
    frame, payload = flight.kept(0, 0)
    assert (Header.unpack(frame).nbytes, bytes(payload)) == (0, b"")
    flight.confirm(1)
    assert flight.kept(0, 0) is None


def test_what_is_moved_is_sent_no_further_ahead_than_anything(flight):
    flight.set_window(0, 1 << 30)
    for sequence in (0, MAX_ROUNDS_AHEAD - 1, MAX_ROUNDS_AHEAD):
        asked = operation(1)
        asked.sequence = sequence
        flight.submit(asked, [LinkShard(0, 0, 1)], 64, 0)
    first, *_ = flight.refill(1.0)
    flight.shut(0)
    flight.move(MAX_ROUNDS_AHEAD, 0, 1)
    assert flight.refill(1.0) == []
    flight.move(0, 0, 1)
    (send,) = flight.refill(1.0)
    assert header_of(send).sequence == header_of(first).sequence == 0
    answer(flight, send)
    (last,) = flight.refill(1.0)
    assert header_of(last).sequence == MAX_ROUNDS_AHEAD
