"""The oracle of `_flight.pyx`: what a worker has in flight, in Python (sans I/O)."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum, auto
from typing import TYPE_CHECKING

from reducer.errors import ReductionError
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_ROUNDS_AHEAD, MessageType
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import cost
from worker_client.protocol.flight import Carried, LinkShard, LinkStats, Send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker_client.protocol.operation import Operation


class _ChunkState(Enum):
    """Where a chunk is."""

    QUEUED = auto()
    SENT = auto()
    STRANDED = auto()  # its link is lost
    DROPPED = auto()  # nothing is expected any more
    DONE = auto()


class _Chunk:
    """One chunk of an all-reduce.

    Attributes:
        home: the link that the plan gave it to.
        number: within its shard.
        link: the one it is assigned to now.
        result: what came, if it is kept.
    """

    __slots__ = ("home", "link", "nbytes", "number", "of", "offset", "result", "sent_at", "state")

    def __init__(self, of: _Progress, home: int, number: int, offset: int, nbytes: int) -> None:
        self.of = of
        self.home = self.link = home
        self.number = number
        self.offset = offset
        self.nbytes = nbytes
        self.state = _ChunkState.QUEUED
        self.sent_at = 0.0
        self.result: Buffer | None = None

    @property
    def contribution(self) -> int:
        """Bytes of its contribution."""
        return self.of.parts * self.nbytes


class _Progress:
    """How far an all-reduce is.

    Attributes:
        header: what its messages have in common.
        operation: None once it has ended, and the buffer is its caller's again.
        remaining: chunks whose result has not come.
        sent: when the latest chunk was sent before the first result came; 0: none yet.
        answered: when that came.
    """

    __slots__ = ("answered", "chunks", "header", "operation", "parts", "remaining", "sent")

    def __init__(
        self, header: Header, operation: Operation, shards: Sequence[LinkShard], chunk_bytes: int
    ) -> None:
        self.header = header
        self.operation: Operation | None = operation
        self.parts = 1 if operation.leaves is None else len(operation.leaves.parts)
        self.sent = self.answered = 0.0
        self.chunks: dict[int, _Chunk] = {}  # by offset
        for link, start, end in shards:
            # At least one: an empty buffer travels as an empty chunk.
            for number, offset in enumerate(range(start, end, chunk_bytes) or (start,)):
                nbytes = min(chunk_bytes, end - offset)
                self.chunks[offset] = _Chunk(self, link, number, offset, nbytes)
        self.remaining = len(self.chunks)


class _Link:
    """One link.

    Attributes:
        queue: chunks to send, in the order of all-reduces and offsets.
        flying: those in flight, in the same order.
    """

    __slots__ = (
        "flying",
        "in_flight",
        "open",
        "pings_suppressed",
        "queue",
        "received",
        "results",
        "retain",
        "rtt",
        "rtt_min",
        "sent",
        "window",
    )

    def __init__(self, window: int, retain: bool) -> None:
        self.window = window
        self.retain = retain
        self.open = False
        # The reducer's latest PING had no body: another such is no news.
        self.pings_suppressed = False
        self.in_flight = 0
        self.queue: list[_Chunk] = []
        self.flying: list[_Chunk] = []
        self.sent = self.received = self.results = 0
        self.rtt = self.rtt_min = 0.0

    def measure(self, sample: float) -> None:
        """Record how long a result took."""
        self.rtt_min = min(self.rtt_min or sample, sample)
        self.rtt += (sample - self.rtt) / 8 if self.rtt else sample


class PlainFlight:
    """Queues, windows, chunks and results of all links; see `protocol.flight.Flight`."""

    def __init__(self, identity: Header) -> None:
        self._identity = identity._replace(type=MessageType.CONTRIBUTION)
        self._links: list[_Link] = []
        self._active: dict[int, _Progress] = {}  # in the order of their sequence numbers
        self._ended: dict[int, _Progress] = {}  # those whose results are kept
        self._next_sequence = 0
        self.reached = 0
        self.retained_bytes = 0

    @property
    def watermark(self) -> int:
        return next(iter(self._active), self._next_sequence)

    def add_link(self, window: int, retain: bool, in_place: bool = False) -> None:
        del in_place  # libzmq has whole messages
        self._links.append(_Link(window, retain))

    def submit(
        self, operation: Operation, shards: Sequence[LinkShard], chunk_bytes: int, epoch: int
    ) -> None:
        sequence = operation.sequence
        self._next_sequence = sequence + 1
        header = self._identity._replace(
            epoch=epoch,
            sequence=sequence,
            total_bytes=operation.nbytes,
            dtype=operation.dtype,
            op=operation.op,
            wire_dtype=operation.dtype,
            since=operation.since,
            tag=operation.tag,
            history=operation.history,
            window=0 if operation.leaves is None else operation.leaves.count,
        )
        progress = self._active[sequence] = _Progress(header, operation, shards, chunk_bytes)
        for chunk in progress.chunks.values():
            insort(self._links[chunk.link].queue, chunk, key=_place)

    def open(self, link: int) -> None:
        link_ = self._links[link]
        link_.open, link_.pings_suppressed = True, False

    def suppress_pings(self, link: int, pings_suppressed: bool) -> None:
        self._links[link].pings_suppressed = pings_suppressed

    def set_window(self, link: int, nbytes: int) -> None:
        self._links[link].window = nbytes

    def measure_anew(self, link: int) -> None:
        self._links[link].rtt_min = 0.0

    def stats(self, link: int) -> LinkStats:
        link_ = self._links[link]
        return LinkStats(
            link_.window,
            link_.in_flight,
            link_.sent,
            link_.received,
            link_.results,
            link_.rtt,
            link_.rtt_min,
        )

    def refill(self, now: float) -> list[Send]:
        sends: list[Send] = []
        before = -1
        links = len(self._links)
        order = [(self._identity.rank + step) % links for step in range(links)]
        while before != len(sends):
            before = len(sends)
            sends += filter(None, (self._next(link, now) for link in order))
        return sends

    def take(self, link: int, frame: Buffer, payload: Buffer, now: float) -> list[int] | None:
        link_ = self._links[link]
        try:
            header = Header.unpack(frame)
        except ReductionError:
            return None
        if (
            header.type is MessageType.PING
            and not payload
            and link_.open
            and link_.pings_suppressed
        ):
            self.confirm(header.watermark)
            return []
        chunk = self._match(link, header, payload)
        if chunk is None:
            return None
        progress = chunk.of
        assert progress.operation is not None
        progress.operation.view[header.offset : header.offset + header.nbytes] = payload
        link_.measure(now - chunk.sent_at)
        progress.answered = progress.answered or now
        self._settle(chunk, _ChunkState.DONE)
        link_.received += header.nbytes
        link_.results += 1
        if link_.retain:
            chunk.result = payload
            self.retained_bytes += chunk.nbytes
        self.confirm(header.watermark)
        progress.remaining -= 1
        if progress.remaining:
            return []
        del self._active[header.sequence]
        progress.operation.sent, progress.operation.answered = progress.sent, progress.answered
        progress.operation = None
        if any(chunk.result is not None for chunk in progress.chunks.values()):
            self._ended[header.sequence] = progress
        else:
            self._release(progress)
        return [header.sequence]

    def _match(self, link: int, header: Header, payload: Buffer) -> _Chunk | None:
        """Return the chunk in flight that a healthy result is for; None: it is none."""
        try:
            check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        except ReductionError:
            return None
        chunk = self._sent(link, header.sequence, header.offset)
        if header.type is not MessageType.RESULT or chunk is None:
            return None
        ours = chunk.of.header
        expected = (ours.total_bytes, chunk.nbytes, ours.dtype, ours.op)
        fits = (header.total_bytes, header.nbytes, header.dtype, header.op) == expected
        return chunk if fits else None

    def expects(self, link: int, sequence: int, offset: int) -> bool:
        return self._sent(link, sequence, offset) is not None

    def waits_for(self, link: int, sequence: int) -> bool:
        chunks = self._chunks(sequence)
        return any(chunk.link == link and chunk.state is _ChunkState.SENT for chunk in chunks)

    def forget(self, link: int, sequence: int) -> None:
        for chunk in self._chunks(sequence):
            if chunk.link == link:
                self._settle(chunk, _ChunkState.DROPPED)

    def end(self, sequence: int) -> None:
        progress = self._active.pop(sequence)
        for chunk in progress.chunks.values():
            self._settle(chunk, _ChunkState.DROPPED)
        self._release(progress)

    def needs(self, link: int) -> list[int]:
        return [
            sequence
            for sequence, progress in self._active.items()
            if any(
                chunk.link == link and chunk.state is not _ChunkState.DONE
                for chunk in progress.chunks.values()
            )
        ]

    def shut(self, link: int) -> None:
        self._links[link].open = False
        for sequence in self._active:
            for chunk in self._chunks(sequence):
                if chunk.link == link and chunk.state is not _ChunkState.DROPPED:
                    self._settle(chunk, _ChunkState.STRANDED)

    def carried(self, link: int, sequence: int | None = None) -> list[Carried]:
        alive = {**self._ended, **self._active}
        wanted = alive if sequence is None else {sequence: alive[sequence]}
        return [
            Carried(
                at,
                progress.header.epoch,
                chunk.offset,
                chunk.home,
                chunk.number,
                chunk.state is _ChunkState.DONE,
            )
            for at, progress in wanted.items()
            for chunk in progress.chunks.values()
            if chunk.link == link and chunk.state is not _ChunkState.DROPPED
        ]

    def move(self, sequence: int, offset: int, link: int) -> None:
        progress = self._active.get(sequence) or self._ended[sequence]
        chunk = progress.chunks[offset]
        self._settle(chunk, _ChunkState.STRANDED)
        chunk.link = link
        if chunk.state is not _ChunkState.DONE:
            chunk.state = _ChunkState.QUEUED
            insort(self._links[link].queue, chunk, key=_place)

    def retained(self, sequence: int, offset: int) -> tuple[bytes, Buffer] | None:
        progress = self._active.get(sequence) or self._ended.get(sequence)
        chunk = progress.chunks.get(offset) if progress else None
        if chunk is None or chunk.result is None:
            return None
        header = chunk.of.header._replace(
            type=MessageType.RETAINED,
            watermark=self.watermark,
            offset=offset,
            nbytes=chunk.nbytes,
        )
        return header.pack(), chunk.result

    def confirm(self, reached: int) -> None:
        # What is in progress here is finished nowhere, whatever a reducer says.
        self.reached = max(self.reached, min(reached, self.watermark))
        for sequence in [sequence for sequence in self._ended if sequence < self.reached]:
            self._release(self._ended.pop(sequence))

    def _release(self, progress: _Progress) -> None:
        for chunk in progress.chunks.values():
            if chunk.result is not None:
                self.retained_bytes -= chunk.nbytes
        # Chunks refer to what they are part of: cut that knot, and the buffer is free at once.
        progress.chunks.clear()

    def _chunks(self, sequence: int) -> Iterator[_Chunk]:
        progress = self._active.get(sequence)
        return iter(progress.chunks.values() if progress else ())

    def _sent(self, link: int, sequence: int, offset: int) -> _Chunk | None:
        progress = self._active.get(sequence)
        chunk = progress.chunks.get(offset) if progress else None
        found = chunk is not None and chunk.link == link and chunk.state is _ChunkState.SENT
        return chunk if found else None

    def _settle(self, chunk: _Chunk, state: _ChunkState) -> None:
        """Take a chunk out of flight or off its queue, unless it is done."""
        link = self._links[chunk.link]
        if chunk.state is _ChunkState.QUEUED:
            _take_out(link.queue, chunk)
        if chunk.state is _ChunkState.SENT:
            _take_out(link.flying, chunk)
            link.in_flight -= cost(chunk.contribution)
        if chunk.state is not _ChunkState.DONE:
            chunk.state = state

    def _next(self, index: int, now: float) -> Send | None:
        """Take the next chunk of a link, if its window has room."""
        link = self._links[index]
        if not link.open or not link.queue:
            return None
        chunk = link.queue[0]
        header, operation = chunk.of.header, chunk.of.operation
        if header.sequence >= self.watermark + MAX_ROUNDS_AHEAD:
            return None
        # What was moved here may precede all in flight; that must not wait for them, as at another
        # rank they may wait for it.
        first = not link.flying or _place(chunk) < _place(link.flying[0])
        if link.in_flight + cost(chunk.contribution) > link.window and not first:
            return None
        _take_out(link.queue, chunk)
        insort(link.flying, chunk, key=_place)
        chunk.state = _ChunkState.SENT
        chunk.sent_at = now
        if not chunk.of.answered:
            chunk.of.sent = now
        link.in_flight += cost(chunk.contribution)
        link.sent += chunk.contribution
        header = header._replace(watermark=self.watermark, offset=chunk.offset, nbytes=chunk.nbytes)
        assert operation is not None
        starts = range(chunk.offset, chunk.offset + chunk.of.parts * operation.nbytes or 1)
        parts = [operation.view[at : at + chunk.nbytes] for at in starts[:: operation.nbytes or 1]]
        return Send(index, header.pack(), parts[0] if len(parts) == 1 else b"".join(parts))


def _place(chunk: _Chunk) -> tuple[int, int]:
    """Return a chunk's place in the order that is the same at every rank."""
    return chunk.of.header.sequence, chunk.offset


def _take_out(chunks: list[_Chunk], chunk: _Chunk) -> None:
    del chunks[bisect_left(chunks, _place(chunk), key=_place)]
