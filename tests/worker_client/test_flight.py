"""What a worker has in flight: the rules one by one."""

import ctypes
import re

import pytest

from reducer.wire.constants import (
    MAX_CHUNK_BYTES,
    MAX_ROUNDS_AHEAD,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Header
from tests.engine.driven import operation
from tests.worker_client.flights import (
    IDENTITY,
    WINDOW,
    answer,
    header_of,
    opened,
    result,
    submit,
    take,
    where,
)
from tests.worker_client.transcripts import play, scenarios
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation

MIB = 1 << 20


@pytest.fixture
def flight():
    return opened()


SCENARIOS = scenarios("flights.txt")


class Script:
    """A flight: does what a line of a transcript says, and returns what comes of it.

    It has a copy of every buffer, in which results replace contributions as they come.
    """

    def __init__(self):
        self.flight = opened()
        self.buffers = []
        self.sends = {}

    def __getattr__(self, name):
        """Ask the flight itself, of which numbers are asked."""
        asked = getattr(self.flight, name)
        return lambda *words: asked(*map(int, words)) if callable(asked) else asked

    def keep(self):
        self.flight = opened(retain=True)

    def window(self, link, nbytes):
        self.flight.set_window(int(link), int(nbytes))

    def in_flight(self, link):
        return self.flight.stats(int(link)).in_flight

    def submit(self, chunk_bytes, *shards):
        parts = [LinkShard(*map(int, re.split("[:-]", shard))) for shard in shards]
        data = bytes(at % 251 for at in range(parts[-1].end))
        self.buffers.append((operation(data), bytearray(data)))
        submit(self.flight, self.buffers[-1][0], parts, int(chunk_bytes.strip(":")), 3)

    def refill(self):
        sends = self.flight.refill(1.0)
        named = {f"{at}:{number}+{offset}": at for at, number, offset in where(sends)}
        for send in sends:
            header = header_of(send)
            data = self.buffers[header.sequence][1]
            assert send.payload == data[header.offset :][: header.nbytes]
        self.sends |= dict(zip(named, sends, strict=True))
        return " ".join(named)

    def answer(self, chunk, *how):
        told, send = dict(zip(how[::2], map(int, how[1::2]), strict=True)), self.sends[chunk]
        header = header_of(send)
        offset = told.get("as", header.offset)
        frames = result(send, offset=offset, watermark=told.get("reached", 0))
        done = take(self.flight, told.get("over", send.link), *frames, 2.0)
        if done is None:
            return "refused"
        self.buffers[header.sequence][1][offset : offset + header.nbytes] = frames[1]
        return f"ends {done[0]}" if done else None

    def carried(self, *which):
        chunks = self.flight.carried(*map(int, which))
        assert {chunk.epoch for chunk in chunks} <= {3}
        return ", ".join(
            f"{one.sequence}+{one.offset} home {one.home} number {one.number}{' done' * one.done}"
            for one in chunks
        )

    def kept(self, number, offset):
        found = self.flight.retained(int(number), int(offset))
        return found and f"{Header.unpack(found[0]).nbytes} bytes"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_transcripts(scenario):
    script = Script()
    for line in play(script, SCENARIOS[scenario]):
        for mine, data in script.buffers:
            assert mine.view == data, line


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


@pytest.mark.extended_cases("8")
@pytest.mark.parametrize("begins", [0, 1, 8])
def test_results_of_a_long_buffer(begins):
    """They go past the caches, where the buffer is aligned."""
    nbytes = 16 * MIB + 21
    memory = bytearray(nbytes + 64)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 16 + begins
    view = memoryview(memory)[begin : begin + nbytes]
    mine = Operation(view, DType.UINT8, ReduceOp.SUM, None, 10.0)
    flight = opened(window=64 * MIB)
    submit(flight, mine, [LinkShard(0, 0, 9 * MIB), LinkShard(1, 9 * MIB, nbytes)], 4 * MIB, 0)
    expected = bytearray(len(memory))
    for place, send in enumerate(sends := flight.refill(1.0)):
        offset, size = header_of(send).offset, header_of(send).nbytes
        said = bytes([1 + place]) * size
        assert answer(flight, send, payload=said) == [0] * (place + 1 == len(sends))
        expected[begin + offset : begin + offset + size] = said
    assert memory == expected


@pytest.mark.parametrize(
    "change",
    [
        {"type": MessageType.CONTRIBUTION},
        {"flags": 1},
        {"sequence": (1 << 64) - 1},
        {"total_bytes": 320},
        {"offset": 32},
        {"offset": 1 << 63},
        {"nbytes": 32, "payload": bytes(32)},
        {"nbytes": 128, "payload": bytes(128)},
        {"payload": bytes(63)},
        {"payload": bytes(65)},
        {"dtype": DType.INT8, "wire_dtype": DType.INT8},
        {"wire_dtype": DType.INT8},
        {"op": 0},
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
    assert take(flight, 0, ping, b"", 1.0) is None, "it may be the first that names nobody"
    flight.suppress_pings(0, True)
    assert take(flight, 1, ping, b"", 1.0) is None, "another reducer may have named somebody"
    assert take(flight, 0, ping, b"{}", 1.0) is None
    assert flight.reached == 0
    assert take(flight, 0, ping, b"", 1.0) == []
    assert flight.reached == 1
    flight.shut(0)
    assert take(flight, 0, ping, b"", 1.0) is None
    flight.open(0)
    assert take(flight, 0, ping, b"", 1.0) is None, "it is another connection's first"


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
    assert take(flight, 0, (frame + b"x")[:size], payload, 2.0) is None
    for damaged in (b"RDSW" + frame[4:], frame[:4] + b"" + frame[5:]):
        assert take(flight, 0, damaged, payload, 2.0) is None
    assert take(flight, 0, frame, payload, 2.0) == [0]


def test_links_are_measured(flight):
    submit(flight, operation(64 * 3), [LinkShard(0, 0, 64 * 3)], 64, 0)
    assert flight.stats(0)[1:] == (0, 0, 0, 0, 0.0, 0.0, 0)
    for send, now in zip(flight.refill(1.0), (1.5, 1.25, 2.0), strict=True):
        answer(flight, send, now)
    stats = flight.stats(0)
    assert (stats.bytes_sent, stats.bytes_received, stats.results) == (192, 192, 3)
    assert stats.min_rtt_s == pytest.approx(0.25)
    assert stats.rtt_s == pytest.approx((0.5 * 7 / 8 + 0.25 / 8) * 7 / 8 + 1 / 8)
    assert flight.stats(1).results == 0
    flight.measure_anew(0)
    assert flight.stats(0) == stats._replace(min_rtt_s=0.0, measured=0)
    submit(flight, operation(64), [LinkShard(0, 0, 64)], 64, 0)
    answer(flight, *flight.refill(2.0), 2.5)
    assert flight.stats(0).min_rtt_s == pytest.approx(0.5)


def test_the_buffer_lives_as_long_as_the_flight_needs_it():
    flight = opened(retain=True)
    buffers = [bytearray(64) for _ in range(3)]
    for sequence, buffer in enumerate(buffers):
        mine = Operation(memoryview(buffer), DType.UINT8, ReduceOp.SUM, None, 1.0)
        assert submit(flight, mine, [LinkShard(sequence % 2, 0, 64)], 64, 0) == sequence
    del mine
    sends = flight.refill(1.0)
    for buffer in buffers:
        with pytest.raises(BufferError):
            buffer.append(0)  # somebody looks at it
    assert answer(flight, sends[0]) == [0]
    flight.end(2)
    flight.shut(1)
    flight.move(1, 0, 0)
    sends = flight.refill(1.0)
    assert answer(flight, *sends) == [1]
    del sends
    for buffer in buffers:
        buffer.append(0)
    assert flight.retained_bytes == 128


def test_a_result_is_kept_until_every_rank_has_it():
    flight = opened(retain=True)
    mine = operation(bytes(range(256)))
    submit(flight, mine, [LinkShard(0, 0, 128), LinkShard(1, 128, 256)], 64, 5)
    for send in flight.refill(1.0):
        answer(flight, send)
    assert flight.retained_bytes == 256
    mine.view[:] = bytes(256)  # it is the caller's again
    frame, payload = flight.retained(0, 128)
    assert bytes(payload) == bytes(255 - byte for byte in range(128, 192))
    expected = {"type": MessageType.RETAINED, "epoch": 5, "watermark": 1, "offset": 128}
    answered = header_of(send)._replace(**expected)
    assert Header.unpack(frame) == answered


def test_what_is_moved_is_sent_no_further_ahead_than_anything():
    flight = opened(retain=True)
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
