"""What a worker has in flight: the rules one by one, and the twins side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reducer.wire.constants import MAX_CHUNK_BYTES, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from worker_client import implementation
from worker_client.flight import Part
from worker_client.operation import Operation

if TYPE_CHECKING:
    import random

    from worker_client.flight import Flight, Send

IDENTITY = Header(MessageType.HELLO, job=7, generation=3, rank=2)
WINDOW = 4096  # four small contributions


def make(name: str, links: int = 2, window: int = WINDOW, **identity: int) -> Flight:
    """A flight whose links are shut."""
    chosen = implementation.select(name)
    assert chosen.name == name
    flight = chosen.flight(IDENTITY._replace(**identity))
    for _ in range(links):
        flight.add_link(window)
    return flight


def operation(data: bytes | bytearray | int, name: str | None = "it") -> Operation:
    view = memoryview(bytearray(data))
    return Operation(view, DType.UINT8, ReduceOp.SUM, name, 1.0)


def header_of(send: Send) -> Header:
    return Header.unpack(send.header)


def where(sends: list[Send]) -> list[tuple[int, int, int]]:
    headers = [(send.link, header_of(send)) for send in sends]
    return [(link, header.sequence, header.offset) for link, header in headers]


def result(send: Send, **change: Any) -> tuple[bytes, bytes]:
    """The frames that answer a contribution."""
    header = header_of(send)._replace(type=MessageType.RESULT, rank=0, watermark=0)
    payload = change.pop("payload", bytes(255 - byte for byte in send.payload))
    return header._replace(**change).pack(), payload


def answer(flight: Flight, send: Send, now: float = 2.0, **change: Any) -> list[int] | None:
    return flight.take(send.link, *result(send, **change), now)


@pytest.fixture(params=["plain", "compiled"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def flight(name: str) -> Flight:
    flight = make(name)
    for link in range(2):
        flight.open(link)
    return flight


# -- sending ------------------------------------------------------------------------------------


def test_a_contribution_says_everything(flight: Flight) -> None:
    mine = operation(bytes(range(200)))
    assert flight.submit(mine, [Part(1, 0, 200)], 128) == 0
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
        tag=mine.tag,
    )
    assert header_of(second) == header_of(first)._replace(offset=128, nbytes=72)
    assert bytes(first.payload) + bytes(second.payload) == bytes(range(200))


def test_an_empty_buffer_is_one_empty_chunk(flight: Flight) -> None:
    flight.submit(operation(0), [Part(1, 0, 0)], 64)
    (send,) = flight.refill(1.0)
    assert (send.link, bytes(send.payload)) == (1, b"")
    assert answer(flight, send) == [0]


@pytest.mark.parametrize("rank", [0, 1, 2, 7])
def test_every_link_gets_a_chunk_before_any_gets_another(name: str, rank: int) -> None:
    flight = make(name, links=3, rank=rank)
    for link in range(3):
        flight.open(link)
    flight.submit(
        operation(64 * 9), [Part(link, 192 * link, 192 * link + 192) for link in range(3)], 64
    )
    links = [send.link for send in flight.refill(1.0)]
    assert links == [(rank + step) % 3 for step in range(3)] * 3


def test_a_link_may_have_several_parts(flight: Flight) -> None:
    flight.submit(operation(512), [Part(0, 0, 128), Part(1, 128, 192), Part(0, 192, 512)], 256)
    sends = flight.refill(1.0)
    assert [(send.link, header_of(send).offset, len(send.payload)) for send in sends] == [
        (0, 0, 128),
        (1, 128, 64),
        (0, 192, 256),
        (0, 448, 64),
    ]
    assert [answer(flight, send) for send in sends] == [[], [], [], [0]]


def test_a_window_counts_bytes_and_lets_one_through(flight: Flight) -> None:
    flight.set_window(0, 2100)
    flight.submit(operation(9000), [Part(0, 0, 9000)], 3000)
    (first,) = flight.refill(1.0)  # larger than the window, but alone
    assert flight.stats(0).in_flight == 3000
    assert answer(flight, first) == []
    flight.set_window(0, 6000)
    assert len(flight.refill(1.0)) == 2
    assert flight.stats(0).window == flight.stats(0).in_flight == 6000


def test_the_smallest_contributions_take_something_of_a_window(flight: Flight) -> None:
    for _ in range(6):
        flight.submit(operation(1), [Part(0, 0, 1)], 64)
    sends = flight.refill(1.0)
    assert len(sends) == 4
    assert flight.stats(0).in_flight == 4096
    answer(flight, sends[2])
    assert where(flight.refill(1.0)) == [(0, 4, 0)]


def test_nothing_is_sent_over_a_link_that_is_shut(name: str) -> None:
    flight = make(name)
    flight.submit(operation(128), [Part(0, 0, 64), Part(1, 64, 128)], 64)
    assert flight.refill(1.0) == []
    flight.open(1)
    assert where(flight.refill(1.0)) == [(1, 0, 64)]
    flight.reset(1)
    flight.submit(operation(64), [Part(1, 0, 64)], 64)
    assert flight.refill(1.0) == []


def test_the_watermark_is_the_first_unfinished(flight: Flight) -> None:
    for _ in range(200):
        flight.submit(operation(1), [Part(0, 0, 1)], 64)
    flight.set_window(0, 1 << 20)
    sends = flight.refill(1.0)
    for send in sends[:0:-1]:
        assert answer(flight, send) == [header_of(send).sequence]
        assert flight.watermark == 0
    assert flight.submit(operation(1), [Part(0, 0, 1)], 64) == 200
    (late,) = flight.refill(1.0)
    assert header_of(late).watermark == 0
    assert answer(flight, sends[0]) == [0]
    assert flight.watermark == 200
    assert answer(flight, late) == [200]
    flight.submit(operation(1), [Part(0, 0, 1)], 64)
    (next_one,) = flight.refill(1.0)
    assert header_of(next_one).watermark == 201


# -- results ------------------------------------------------------------------------------------


def test_a_result_replaces_its_chunk(flight: Flight) -> None:
    mine = operation(bytes(range(192)))
    flight.submit(mine, [Part(0, 0, 64), Part(1, 64, 192)], 64)
    sends = flight.refill(1.0)
    assert answer(flight, sends[2]) == []
    assert bytes(mine.view[:128]) == bytes(range(128))  # contributions may still lie there
    assert answer(flight, sends[0]) == []
    assert answer(flight, sends[1]) == [0]
    assert bytes(mine.view) == bytes(255 - byte for byte in range(192))
    assert answer(flight, sends[1]) is None  # it is over


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
def test_what_is_no_healthy_result_changes_nothing(flight: Flight, change: dict) -> None:
    mine = operation(bytes(range(256)))
    flight.submit(mine, [Part(0, 0, 256)], 64)
    sends = flight.refill(1.0)
    before = flight.stats(0)
    assert answer(flight, sends[0], **change) is None
    assert bytes(mine.view) == bytes(range(256))
    assert flight.stats(0) == before
    assert [answer(flight, send) for send in sends] == [[], [], [], [0]]


def test_a_chunk_that_is_too_large_is_not_taken(flight: Flight) -> None:
    for size in (MAX_CHUNK_BYTES + 64, MAX_CHUNK_BYTES):
        flight.submit(operation(size), [Part(0, 0, size)], size)
    flight.set_window(0, 1 << 30)
    larger, largest = flight.refill(1.0)
    assert answer(flight, larger) is None
    assert answer(flight, largest) == [1]


@pytest.mark.parametrize("size", [0, 1, 95, 97])
def test_what_is_no_header_changes_nothing(flight: Flight, size: int) -> None:
    flight.submit(operation(64), [Part(0, 0, 64)], 64)
    (send,) = flight.refill(1.0)
    frame, payload = result(send)
    assert flight.take(0, (frame + b"x")[:size], payload, 2.0) is None
    for damaged in (b"RDSW" + frame[4:], frame[:4] + b"" + frame[5:]):
        assert flight.take(0, damaged, payload, 2.0) is None
    assert flight.take(0, frame, payload, 2.0) == [0]


def test_a_result_counts_on_its_own_link_alone(flight: Flight) -> None:
    flight.submit(operation(64), [Part(0, 0, 64)], 64)
    (send,) = flight.refill(1.0)
    assert flight.take(1, *result(send), 2.0) is None
    assert answer(flight, send) == [0]


def test_a_result_of_what_was_not_sent_is_none(flight: Flight) -> None:
    flight.submit(operation(64 * 8), [Part(0, 0, 64 * 8)], 64)
    sends = flight.refill(1.0)
    assert answer(flight, sends[3], offset=64 * 4) is None
    assert flight.expects(0, 0, 64 * 3)
    assert not flight.expects(0, 0, 64 * 4)
    assert not flight.expects(0, 0, 32)
    assert not flight.expects(1, 0, 64 * 3)
    assert not flight.expects(0, 1, 0)


def test_links_are_measured(flight: Flight) -> None:
    flight.submit(operation(64 * 3), [Part(0, 0, 64 * 3)], 64)
    assert flight.stats(0)[1:] == (0, 0, 0, 0, 0.0, 0.0)
    for send, now in zip(flight.refill(1.0), (1.5, 1.25, 2.0), strict=True):
        answer(flight, send, now)
    stats = flight.stats(0)
    assert (stats.bytes_sent, stats.bytes_received, stats.results) == (192, 192, 3)
    assert stats.min_rtt_s == pytest.approx(0.25)
    assert stats.rtt_s == pytest.approx((0.5 * 7 / 8 + 0.25 / 8) * 7 / 8 + 1 / 8)
    assert flight.stats(1).results == 0


# -- what fails ---------------------------------------------------------------------------------


def test_what_has_ended_is_neither_sent_nor_expected(flight: Flight) -> None:
    first, second = operation(64 * 6), operation(64)
    flight.submit(first, [Part(0, 0, 64 * 6)], 64)
    flight.submit(second, [Part(0, 0, 64)], 64)
    sends = flight.refill(1.0)
    assert len(sends) == 4
    flight.end(0)
    assert flight.watermark == 1
    assert flight.stats(0).in_flight == 0
    assert answer(flight, sends[0]) is None
    assert bytes(first.view) == bytes(64 * 6)
    assert where(flight.refill(1.0)) == [(0, 1, 0)]


def test_forgetting_concerns_one_link(flight: Flight) -> None:
    flight.submit(operation(64 * 12), [Part(0, 0, 64 * 6), Part(1, 64 * 6, 64 * 12)], 64)
    sends = flight.refill(1.0)
    flight.forget(0, 0)
    assert not flight.waits_for(0, 0)
    assert flight.waits_for(1, 0)
    assert (flight.stats(0).in_flight, flight.stats(1).in_flight) == (0, 4096)
    assert flight.refill(1.0) == []
    assert answer(flight, sends[0]) is None
    assert answer(flight, sends[1]) == []
    flight.forget(1, 5)  # nobody knows that one


def test_a_reset_names_what_needed_the_link(flight: Flight) -> None:
    waiting, queued, done, elsewhere = (operation(64) for _ in range(4))
    for mine, link in ((done, 0), (waiting, 0), (elsewhere, 1)):
        flight.submit(mine, [Part(link, 0, 64)], 64)
    sends = flight.refill(1.0)
    answer(flight, next(send for send in sends if header_of(send).sequence == 0))
    flight.set_window(0, 1)
    flight.submit(queued, [Part(0, 0, 64)], 64)
    assert flight.refill(1.0) == []
    assert flight.reset(0) == [1, 3]
    assert flight.stats(0).in_flight == 0
    for sequence in (1, 3):
        flight.end(sequence)
    assert flight.reset(0) == []
    assert flight.waits_for(1, 2)


def test_the_buffer_lives_as_long_as_the_flight_needs_it(flight: Flight) -> None:
    buffers = [bytearray(64), bytearray(64)]
    for sequence, buffer in enumerate(buffers):
        mine = Operation(memoryview(buffer), DType.UINT8, ReduceOp.SUM, None, 1.0)
        assert flight.submit(mine, [Part(0, 0, 64)], 64) == sequence
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


# -- the twins side by side -----------------------------------------------------------------------


@dataclass
class Twin:
    """A flight, its own copy of every buffer, and what it has sent."""

    flight: Any
    buffers: list[Operation] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)


class Twins(RuleBasedStateMachine):
    """Whatever is asked of both, both answer the same."""

    @initialize(
        links=st.integers(1, 3), rank=st.integers(0, 2), window=st.sampled_from([1, WINDOW])
    )
    def begin(self, links: int, rank: int, window: int) -> None:
        self.links = links
        self.now = 0.0
        self.active: set[int] = set()
        self.twins = [Twin(make(name, links, window, rank=rank)) for name in ("plain", "compiled")]

    def both(self, ask: Any) -> Any:
        """Ask both and return the common answer."""
        self.now += 0.001
        plain, compiled = (ask(twin) for twin in self.twins)
        assert plain == compiled
        return plain

    def link(self, choice: random.Random) -> int:
        return choice.randrange(self.links)

    @rule(choice=st.randoms(use_true_random=False), sizes=st.lists(st.integers(1, 6), max_size=5))
    def submit(self, choice: random.Random, sizes: list[int]) -> None:
        cut, end = [], 0
        for size in sizes:
            start, end = end, end + 64 * size
            cut.append(Part(self.link(choice), start, end))
        cut = cut or [Part(self.link(choice), 0, 0)]
        chunk_bytes = 64 * choice.randint(1, 3)
        data = choice.randbytes(end)

        def ask(twin: Twin) -> int:
            twin.buffers.append(operation(data))
            return twin.flight.submit(twin.buffers[-1], cut, chunk_bytes)

        self.active.add(self.both(ask))

    @rule(
        choice=st.randoms(use_true_random=False), window=st.sampled_from([0, 1000, 4096, 1 << 20])
    )
    def change_a_link(self, choice: random.Random, window: int) -> None:
        link = self.link(choice)
        self.both(lambda twin: twin.flight.open(link))
        self.both(lambda twin: twin.flight.set_window(link, window))

    @rule()
    def refill(self) -> None:
        def ask(twin: Twin) -> list[tuple]:
            sends = twin.flight.refill(self.now)
            twin.sends += sends
            return [(send.link, header_of(send), bytes(send.payload)) for send in sends]

        self.both(ask)

    @precondition(lambda self: self.twins[0].sends)
    @rule(choice=st.randoms(use_true_random=False), odd=st.integers(0, 9))
    def answer(self, choice: random.Random, odd: int) -> None:
        at = choice.randrange(len(self.twins[0].sends))
        send = self.twins[0].sends[at]
        link = send.link if odd else self.link(choice)
        changes = [{}] * 9 + [
            {"offset": header_of(send).offset + 64},
            {"sequence": header_of(send).sequence + 1},
            {"nbytes": 64, "payload": bytes(64)},
            {"op": ReduceOp.MIN},
        ]
        change = choice.choice(changes)
        frames = result(send, **dict(change))
        done = self.both(lambda twin: twin.flight.take(link, *frames, self.now))
        self.active -= set(done or ())

    @precondition(lambda self: self.active)
    @rule(choice=st.randoms(use_true_random=False), whole=st.booleans())
    def give_up(self, choice: random.Random, whole: bool) -> None:
        sequence, link = choice.choice(sorted(self.active)), self.link(choice)
        if whole:
            self.active.remove(sequence)
            self.both(lambda twin: twin.flight.end(sequence))
        else:
            self.both(lambda twin: twin.flight.forget(link, sequence))

    @rule(choice=st.randoms(use_true_random=False), often=st.integers(0, 3))
    def lose_a_link(self, choice: random.Random, often: int) -> None:
        link = self.link(choice)
        if often == 0:
            for sequence in self.both(lambda twin: twin.flight.reset(link)):
                self.active.remove(sequence)
                self.both(lambda twin, sequence=sequence: twin.flight.end(sequence))

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "twins"):
            return
        plain, compiled = (twin.flight for twin in self.twins)
        assert plain.watermark == compiled.watermark
        for link in range(self.links):
            stats = plain.stats(link)
            assert compiled.stats(link) == pytest.approx(stats, abs=1e-6)
            assert 0 <= stats.in_flight <= max(stats.in_flight, stats.window)
            for sequence in self.active:
                self.both(lambda twin, at=(link, sequence): twin.flight.waits_for(*at))
                self.both(lambda twin, at=(link, sequence): twin.flight.expects(*at, 64))
        for one, other in zip(*(twin.buffers for twin in self.twins), strict=True):
            assert one.view == other.view


TestTwins = Twins.TestCase
TestTwins.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)
