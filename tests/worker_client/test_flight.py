"""What a worker has in flight: the rules one by one."""

import ctypes

import pytest

from reducer.runtime.implementation import NAMES
from reducer.wire.constants import MAX_CHUNK_BYTES, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from tests.engine.driven import operation
from tests.worker_client.flights import (
    IDENTITY,
    WINDOW,
    answer,
    header_of,
    make,
    opened,
    result,
    submit,
    where,
)
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation

MIB = 1 << 20


@pytest.fixture(params=NAMES)
def impl(request):
    return request.param


@pytest.fixture
def flight(impl):
    return opened(impl)


# -- sending ------------------------------------------------------------------------------------


def test_a_contribution_says_everything(flight):
    mine = operation(bytes(range(200)))
    mine.since, mine.history = (1 << 32) - 1, (1 << 64) - 1
    assert submit(flight, mine, [LinkShard(1, 0, 200)], 128, 0) == 0
    first, second = flight.refill(1.0)
    assert (first.link, second.link) == (1, 1)
    assert header_of(first) == IDENTITY._replace(
        type=MessageType.CONTRIBUTION,
        sequence=0,
        total_bytes=200,
        offset=0,
        nbytes=128,
        dtype=DType.UINT8,
        op=ReduceOp.SUM,
        wire_dtype=DType.UINT8,
        since=(1 << 32) - 1,
        tag=mine.tag,
        history=(1 << 64) - 1,
    )
    assert header_of(second) == header_of(first)._replace(offset=128, nbytes=72)
    assert bytes(first.payload) + bytes(second.payload) == bytes(range(200))


def test_an_empty_buffer_is_one_empty_chunk(flight):
    submit(flight, operation(0), [LinkShard(1, 0, 0)], 64, 0)
    (send,) = flight.refill(1.0)
    assert (send.link, bytes(send.payload)) == (1, b"")
    assert answer(flight, send) == [0]


@pytest.mark.parametrize("rank", [0, 1, 2, 7])
def test_every_link_gets_a_chunk_before_any_gets_another(impl, rank):
    flight = opened(impl, links=3, rank=rank)
    parts = [LinkShard(link, 192 * link, 192 * link + 192) for link in range(3)]
    submit(flight, operation(64 * 9), parts, 64, 0)
    links = [send.link for send in flight.refill(1.0)]
    assert links == [(rank + step) % 3 for step in range(3)] * 3


def test_a_link_may_have_several_parts(flight):
    parts = [LinkShard(0, 0, 128), LinkShard(1, 128, 192), LinkShard(0, 192, 512)]
    submit(flight, operation(512), parts, 256, 0)
    sends = flight.refill(1.0)
    found = [(send.link, header_of(send).offset, len(send.payload)) for send in sends]
    assert found == [(0, 0, 128), (1, 128, 64), (0, 192, 256), (0, 448, 64)]
    assert [answer(flight, send) for send in sends] == [[], [], [], [0]]


def test_a_window_counts_bytes_and_lets_one_through(flight):
    flight.set_window(0, 2100)
    submit(flight, operation(9000), [LinkShard(0, 0, 9000)], 3000, 0)
    (first,) = flight.refill(1.0)  # larger than the window, but alone
    assert flight.stats(0).in_flight == 3000
    assert answer(flight, first) == []
    flight.set_window(0, 6000)
    assert len(flight.refill(1.0)) == 2
    assert flight.stats(0).window == flight.stats(0).in_flight == 6000


def test_the_smallest_contributions_take_something_of_a_window(flight):
    for _ in range(6):
        submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0)
    sends = flight.refill(1.0)
    assert len(sends) == 4
    assert flight.stats(0).in_flight == 4096
    answer(flight, sends[2])
    assert where(flight.refill(1.0)) == [(0, 4, 0)]


def test_nothing_is_sent_over_a_link_that_is_shut(impl):
    flight = make(impl)
    submit(flight, operation(128), [LinkShard(0, 0, 64), LinkShard(1, 64, 128)], 64, 0)
    assert flight.refill(1.0) == []
    flight.open(1)
    assert where(flight.refill(1.0)) == [(1, 0, 64)]
    flight.shut(1)
    submit(flight, operation(64), [LinkShard(1, 0, 64)], 64, 0)
    assert flight.refill(1.0) == []


def test_the_watermark_is_the_first_unfinished(flight):
    for _ in range(200):
        submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0)
    flight.set_window(0, 1 << 20)
    sends = flight.refill(1.0)
    for send in sends[:0:-1]:
        assert answer(flight, send) == [header_of(send).sequence]
        assert flight.watermark == 0
    assert submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0) == 200
    (late,) = flight.refill(1.0)
    assert header_of(late).watermark == 0
    assert answer(flight, sends[0]) == [0]
    assert flight.watermark == 200
    assert answer(flight, late) == [200]
    submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0)
    (next_one,) = flight.refill(1.0)
    assert header_of(next_one).watermark == 201


def test_numbers_may_be_left_out(flight):
    for left_out in (1, 126, 5000, 0, 100_000):
        submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0, left_out=left_out)
    flight.set_window(0, 1 << 20)
    sends = flight.refill(1.0)
    numbers = [header_of(send).sequence for send in sends]
    assert numbers == [1, 128, 5129, 5130, 105_131]
    assert [header_of(send).watermark for send in sends] == [1] * 5
    for send, watermark in zip(sends[1::-1], (1, 5129), strict=True):
        assert answer(flight, send) == [header_of(send).sequence]
        assert flight.watermark == watermark
    flight.end(5129)
    assert flight.watermark == 5130
    for send in sends[3:]:
        assert answer(flight, send) == [header_of(send).sequence]
    assert flight.watermark == 105_132
    submit(flight, operation(1), [LinkShard(0, 0, 1)], 64, 0, left_out=1 << 40)
    (last,) = flight.refill(1.0)
    assert header_of(last).watermark == header_of(last).sequence == (1 << 40) + 105_132
    assert answer(flight, last, sequence=1) is None
    assert answer(flight, last) == [header_of(last).sequence]


# -- results ------------------------------------------------------------------------------------


def test_a_result_replaces_its_chunk(flight):
    mine = operation(bytes(range(192)))
    submit(flight, mine, [LinkShard(0, 0, 64), LinkShard(1, 64, 192)], 64, 0)
    sends = flight.refill(1.0)
    assert answer(flight, sends[2]) == []
    assert bytes(mine.view[:128]) == bytes(range(128))  # contributions may still lie there
    assert answer(flight, sends[0]) == []
    assert answer(flight, sends[1]) == [0]
    assert bytes(mine.view) == bytes(255 - byte for byte in range(192))
    assert answer(flight, sends[1]) is None  # it is over


def test_when_it_was_sent_and_answered_is_known_at_its_end(flight):
    mine = operation(bytes(3 * WINDOW))
    submit(flight, mine, [LinkShard(0, 0, 3 * WINDOW)], WINDOW // 2, 0)
    first, *_ = sends = flight.refill(1.0)
    flight.open(1)
    assert (mine.sent, mine.answered) == (0.0, 0.0)
    assert answer(flight, first, now=2.0) == []
    while mine.answered == 0.0:  # what the window held back is no news of when it was sent
        sends += flight.refill(3.0)
        answer(flight, sends.pop(1), now=4.0)
    assert (mine.sent, mine.answered) == (1.0, 2.0)


@pytest.mark.extended_cases("compiled-8", "plain-0", "plain-1")
@pytest.mark.parametrize("begins", [0, 1, 8])
def test_results_of_a_long_buffer(impl, begins):
    """They go past the caches, where the buffer is aligned."""
    nbytes = 16 * MIB + 21
    memory = bytearray(nbytes + 64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = -address % 16 + begins
    view = memoryview(memory)[begin : begin + nbytes]
    mine = Operation(view, DType.UINT8, ReduceOp.SUM, None, 10.0)
    flight = opened(impl, window=64 * MIB)
    submit(flight, mine, [LinkShard(0, 0, 9 * MIB), LinkShard(1, 9 * MIB, nbytes)], 4 * MIB, 0)
    for place, send in enumerate(sends := flight.refill(1.0)):
        said = bytes([1 + place]) * header_of(send).nbytes
        assert answer(flight, send, payload=said) == [0] * (place + 1 == len(sends))
    expected = bytearray(nbytes)
    for place, send in enumerate(sends):
        offset, size = header_of(send).offset, header_of(send).nbytes
        expected[offset : offset + size] = bytes([1 + place]) * size
    assert mine.view == expected
    assert not any(memory[:begin])
    assert not any(memory[begin + nbytes :])


@pytest.mark.parametrize(
    "change",
    [
        {"type": MessageType.CONTRIBUTION},
        {"type": MessageType.PING},
        {"flags": 1},
        {"sequence": 1},
        {"sequence": (1 << 64) - 1},
        {"total_bytes": 320},
        {"total_bytes": 0},
        {"offset": 32},
        {"offset": 1 << 63},
        {"nbytes": 32, "payload": bytes(32)},
        {"nbytes": 128, "payload": bytes(128)},
        {"nbytes": 0, "payload": b""},
        {"payload": bytes(63)},
        {"payload": bytes(65)},
        {"dtype": DType.INT8, "wire_dtype": DType.INT8},
        {"dtype": 0, "wire_dtype": 0},
        {"dtype": 9, "wire_dtype": 9},
        {"wire_dtype": DType.INT8},
        {"op": ReduceOp.MAX},
        {"op": ReduceOp.MEAN},
        {"op": 0},
        {"op": 6},
    ],
    ids=lambda change: "-".join(f"{field}={value!r:.12}" for field, value in change.items()),
)
def test_what_is_no_healthy_result_changes_nothing(flight, change):
    mine = operation(bytes(range(256)))
    submit(flight, mine, [LinkShard(0, 0, 256)], 64, 0)
    sends = flight.refill(1.0)
    before = flight.stats(0)
    assert answer(flight, sends[0], **change) is None
    assert bytes(mine.view) == bytes(range(256))
    assert flight.stats(0) == before
    assert [answer(flight, send) for send in sends] == [[], [], [], [0]]


def test_a_ping_is_taken_if_it_names_nobody_as_the_one_before(flight):
    ping = Header(MessageType.PING, watermark=1).pack()
    submit(flight, operation(bytes(64)), [LinkShard(0, 0, 64)], 64, 0)
    flight.end(0)
    assert flight.take(0, ping, b"", 1.0) is None, "it may be the first that names nobody"
    flight.set_calm(0, True)
    assert flight.take(1, ping, b"", 1.0) is None, "another reducer may have named somebody"
    assert flight.take(0, ping, b"{}", 1.0) is None
    assert flight.reached == 0
    assert flight.take(0, ping, b"", 1.0) == []
    assert flight.reached == 1
    flight.shut(0)
    assert flight.take(0, ping, b"", 1.0) is None
    flight.open(0)
    assert flight.take(0, ping, b"", 1.0) is None, "it is another connection's first"


def test_a_chunk_that_is_too_large_is_not_taken(flight):
    for size in (MAX_CHUNK_BYTES + 64, MAX_CHUNK_BYTES):
        submit(flight, operation(size), [LinkShard(0, 0, size)], size, 0)
    flight.set_window(0, 1 << 30)
    larger, largest = flight.refill(1.0)
    assert answer(flight, larger) is None
    assert answer(flight, largest) == [1]


@pytest.mark.parametrize("size", [0, 1, 95, 97])
def test_what_is_no_header_changes_nothing(flight, size):
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    (send,) = flight.refill(1.0)
    frame, payload = result(send)
    assert flight.take(0, (frame + b"x")[:size], payload, 2.0) is None
    for damaged in (b"RDSW" + frame[4:], frame[:4] + b"" + frame[5:]):
        assert flight.take(0, damaged, payload, 2.0) is None
    assert flight.take(0, frame, payload, 2.0) == [0]


def test_a_result_counts_on_its_own_link_alone(flight):
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    (send,) = flight.refill(1.0)
    assert flight.take(1, *result(send), 2.0) is None
    assert answer(flight, send) == [0]


def test_a_result_of_what_was_not_sent_is_none(flight):
    submit(flight, operation(64 * 8), [LinkShard(0, 0, 64 * 8)], 64, 0)
    sends = flight.refill(1.0)
    assert answer(flight, sends[3], offset=64 * 4) is None
    assert flight.expects(0, 0, 64 * 3)
    assert not flight.expects(0, 0, 64 * 4)
    assert not flight.expects(0, 0, 32)
    assert not flight.expects(1, 0, 64 * 3)
    assert not flight.expects(0, 1, 0)


def test_links_are_measured(flight):
    submit(flight, operation(64 * 3), [LinkShard(0, 0, 64 * 3)], 64, 0)
    assert flight.stats(0)[1:] == (0, 0, 0, 0, 0.0, 0.0)
    for send, now in zip(flight.refill(1.0), (1.5, 1.25, 2.0), strict=True):
        answer(flight, send, now)
    stats = flight.stats(0)
    assert (stats.bytes_sent, stats.bytes_received, stats.results) == (192, 192, 3)
    assert stats.min_rtt_s == pytest.approx(0.25)
    assert stats.rtt_s == pytest.approx((0.5 * 7 / 8 + 0.25 / 8) * 7 / 8 + 1 / 8)
    assert flight.stats(1).results == 0
    flight.measure_anew(0)
    assert flight.stats(0) == stats._replace(min_rtt_s=0.0)
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    answer(flight, *flight.refill(2.0), 2.5)
    assert flight.stats(0).min_rtt_s == pytest.approx(0.5)


# -- what fails ---------------------------------------------------------------------------------


def test_what_has_ended_is_neither_sent_nor_expected(flight):
    first, second = operation(64 * 6), operation(64)
    submit(flight, first, [LinkShard(0, 0, 64 * 6)], 64, 0)
    submit(flight, second, [LinkShard(0, 0, 64)], 64, 0)
    sends = flight.refill(1.0)
    assert len(sends) == 4
    flight.end(0)
    assert flight.watermark == 1
    assert flight.stats(0).in_flight == 0
    assert answer(flight, sends[0]) is None
    assert bytes(first.view) == bytes(64 * 6)
    assert where(flight.refill(1.0)) == [(0, 1, 0)]


def test_forgetting_concerns_one_link(flight):
    parts = [LinkShard(0, 0, 64 * 6), LinkShard(1, 64 * 6, 64 * 12)]
    submit(flight, operation(64 * 12), parts, 64, 0)
    sends = flight.refill(1.0)
    flight.forget(0, 0)
    assert not flight.waits_for(0, 0)
    assert flight.waits_for(1, 0)
    assert (flight.stats(0).in_flight, flight.stats(1).in_flight) == (0, 4096)
    assert flight.refill(1.0) == []
    assert answer(flight, sends[0]) is None
    assert answer(flight, sends[1]) == []
    flight.forget(1, 5)  # nobody knows that one


def test_what_needs_a_link(flight):
    waiting, queued, done, elsewhere = (operation(64) for _ in range(4))
    for mine, link in ((done, 0), (waiting, 0), (elsewhere, 1)):
        submit(flight, mine, [LinkShard(link, 0, 64)], 64, 0)
    sends = flight.refill(1.0)
    answer(flight, next(send for send in sends if header_of(send).sequence == 0))
    flight.set_window(0, 1)
    submit(flight, queued, [LinkShard(0, 0, 64)], 64, 0)
    assert flight.refill(1.0) == []
    assert flight.needs(0) == [1, 3]
    flight.shut(0)
    assert flight.needs(0) == [1, 3]
    assert flight.needs(1) == [2]
    assert flight.stats(0).in_flight == 0
    for sequence in (1, 3):
        flight.end(sequence)
    assert flight.needs(0) == []
    assert flight.waits_for(1, 2)


def test_the_buffer_lives_as_long_as_the_flight_needs_it(flight):
    buffers = [bytearray(64), bytearray(64)]
    for sequence, buffer in enumerate(buffers):
        mine = Operation(memoryview(buffer), DType.UINT8, ReduceOp.SUM, None, 1.0)
        assert submit(flight, mine, [LinkShard(0, 0, 64)], 64, 0) == sequence
    del mine
    sends = flight.refill(1.0)
    for buffer in buffers:
        with pytest.raises(BufferError):
            buffer.append(0)  # somebody looks at it
    frames = [(send.link, *result(send)) for send in sends]
    del sends
    assert flight.take(*frames[0], 2.0) == [0]
    flight.end(1)
    for buffer in buffers:
        buffer.append(0)
