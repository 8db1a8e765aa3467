"""The plain twin of `_flight.pyx`: what a worker has in flight, in Python (sans I/O)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING

from reducer.errors import ReductionError
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_ROUNDS_AHEAD, MessageType
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import charge
from worker_client.flight import LinkStats, Part, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.operation import Operation


class _Progress:
    """How far an all-reduce is; `remaining` counts the chunks whose result has not come."""

    __slots__ = ("chunk_bytes", "operation", "parts", "remaining", "sequence")

    def __init__(
        self, sequence: int, operation: Operation, parts: Sequence[Part], chunk_bytes: int
    ) -> None:
        self.sequence = sequence
        self.operation = operation
        self.chunk_bytes = chunk_bytes
        self.parts = [_Part(self, part) for part in parts]
        self.remaining = sum(part.chunks for part in self.parts)

    def find(self, link: int, offset: int) -> tuple[_Part, int] | None:
        """Return the chunk at `offset` as part and number, if it is in flight on this link."""
        at = bisect_right(self.parts, offset, key=lambda part: part.start)
        if at == 0:
            return None
        part = self.parts[at - 1]
        chunk = (offset - part.start) // self.chunk_bytes
        found = part.link == link and chunk in part.sent_at and part.offset(chunk) == offset
        return (part, chunk) if found else None


class _Part:
    """One part of a buffer, which travels over one link in chunks.

    Attributes:
        next: number of the first chunk that was not sent.
        sent_at: when the chunks in flight were sent, by their numbers.
    """

    __slots__ = ("chunks", "end", "link", "next", "of", "sent_at", "start")

    def __init__(self, of: _Progress, part: Part) -> None:
        self.of = of
        self.link, self.start, self.end = part
        # At least one: an empty buffer travels as an empty chunk.
        self.chunks = max(1, -(-(self.end - self.start) // of.chunk_bytes))
        self.next = 0
        self.sent_at: dict[int, float] = {}

    def offset(self, chunk: int) -> int:
        """Where a chunk starts in the buffer."""
        return self.start + chunk * self.of.chunk_bytes

    def nbytes(self, chunk: int) -> int:
        """Size of a chunk."""
        return min(self.of.chunk_bytes, self.end - self.offset(chunk))


class _Link:
    """One link; `queue` holds the parts that have chunks to send, in order."""

    __slots__ = (
        "in_flight",
        "open",
        "queue",
        "received",
        "results",
        "rtt",
        "rtt_min",
        "sent",
        "window",
    )

    def __init__(self, window: int) -> None:
        self.window = window
        self.open = False
        self.in_flight = 0
        self.queue: deque[_Part] = deque()
        self.sent = self.received = self.results = 0
        self.rtt = self.rtt_min = 0.0

    def settle(self, part: _Part, chunk: int) -> None:
        """Take a chunk out of flight."""
        del part.sent_at[chunk]
        self.in_flight -= charge(part.nbytes(chunk))

    def abandon(self, part: _Part) -> None:
        """Expect and send nothing more of a part."""
        for chunk in tuple(part.sent_at):
            self.settle(part, chunk)
        if part.next < part.chunks:
            self.queue.remove(part)
        part.next = part.chunks

    def measure(self, sample: float) -> None:
        """Take note of how long a result took."""
        self.rtt_min = min(self.rtt_min or sample, sample)
        self.rtt += (sample - self.rtt) / 8 if self.rtt else sample


class PlainFlight:
    """Queues, windows, chunks and results of all links; see `worker_client.flight.Flight`."""

    def __init__(self, identity: Header) -> None:
        self._identity = identity._replace(type=MessageType.CONTRIBUTION)
        self._links: list[_Link] = []
        self._active: dict[int, _Progress] = {}  # in the order of their sequence numbers
        self._next_sequence = 0

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here."""
        return next(iter(self._active), self._next_sequence)

    def add_link(self, window: int) -> None:
        """Add a link, shut until `open`."""
        self._links.append(_Link(window))

    def submit(self, operation: Operation, parts: Sequence[Part], chunk_bytes: int) -> int:
        """Queue an all-reduce and return its sequence number."""
        sequence = self._next_sequence
        self._next_sequence += 1
        progress = self._active[sequence] = _Progress(sequence, operation, parts, chunk_bytes)
        for part in progress.parts:
            self._links[part.link].queue.append(part)
        return sequence

    def open(self, link: int) -> None:
        """Let contributions be sent to a reducer."""
        self._links[link].open = True

    def set_window(self, link: int, nbytes: int) -> None:
        """Change how many bytes may be in flight on a link."""
        self._links[link].window = nbytes

    def stats(self, link: int) -> LinkStats:
        """Return what is known about a link."""
        its = self._links[link]
        return LinkStats(
            its.window, its.in_flight, its.sent, its.received, its.results, its.rtt, its.rtt_min
        )

    def refill(self, now: float) -> list[Send]:
        """Return the contributions that the windows have room for."""
        sends: list[Send] = []
        before = -1
        links = len(self._links)
        order = [(self._identity.rank + step) % links for step in range(links)]
        while before != len(sends):
            before = len(sends)
            sends += filter(None, (self._next(link, now) for link in order))
        return sends

    def take(self, link: int, frame: Buffer, payload: Buffer, now: float) -> list[int] | None:
        """Take a healthy result and return what it completes; None if it is anything else."""
        try:
            header = Header.unpack(frame)
            if header.type is not MessageType.RESULT:
                return None
            check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        except ReductionError:
            return None
        progress = self._active.get(header.sequence)
        found = progress.find(link, header.offset) if progress else None
        if progress is None or found is None:
            return None
        operation, (part, chunk) = progress.operation, found
        expected = (operation.view.nbytes, part.nbytes(chunk), operation.dtype, operation.op)
        if (header.total_bytes, header.nbytes, header.dtype, header.op) != expected:
            return None
        operation.view[header.offset : header.offset + header.nbytes] = payload
        its = self._links[link]
        its.measure(now - part.sent_at[chunk])
        its.settle(part, chunk)
        its.received += header.nbytes
        its.results += 1
        progress.remaining -= 1
        if progress.remaining:
            return []
        self._retire(header.sequence)
        return [header.sequence]

    def expects(self, link: int, sequence: int, offset: int) -> bool:
        """Whether the chunk at this offset is in flight on a link."""
        progress = self._active.get(sequence)
        return progress is not None and progress.find(link, offset) is not None

    def waits_for(self, link: int, sequence: int) -> bool:
        """Whether any chunk of an all-reduce is in flight on a link."""
        return any(part.sent_at for part in self._parts(link, sequence))

    def forget(self, link: int, sequence: int) -> None:
        """Expect and send nothing more of an all-reduce on a link."""
        for part in self._parts(link, sequence):
            self._links[link].abandon(part)

    def end(self, sequence: int) -> None:
        """End an all-reduce that has failed."""
        for part in self._active[sequence].parts:
            self._links[part.link].abandon(part)
        self._retire(sequence)

    def reset(self, link: int) -> list[int]:
        """Shut a link, forget what it carried, and return which all-reduces needed it."""
        self._links[link].open = False
        needed = [
            sequence
            for sequence in self._active
            if any(part.sent_at or part.next < part.chunks for part in self._parts(link, sequence))
        ]
        for sequence in needed:
            self.forget(link, sequence)
        return needed

    def _retire(self, sequence: int) -> None:
        # Parts refer to what they are part of: cut that knot, and the buffer is free at once.
        self._active.pop(sequence).parts.clear()

    def _parts(self, link: int, sequence: int) -> list[_Part]:
        progress = self._active.get(sequence)
        return [part for part in progress.parts if part.link == link] if progress else []

    def _next(self, index: int, now: float) -> Send | None:
        """Take the next chunk of a link, if its window has room."""
        link = self._links[index]
        if not link.open or not link.queue:
            return None
        part = link.queue[0]
        operation, chunk = part.of.operation, part.next
        if part.of.sequence >= self.watermark + MAX_ROUNDS_AHEAD:
            return None
        offset, nbytes = part.offset(chunk), part.nbytes(chunk)
        if link.in_flight and link.in_flight + charge(nbytes) > link.window:
            return None
        part.next += 1
        if part.next == part.chunks:
            link.queue.popleft()
        part.sent_at[chunk] = now
        link.in_flight += charge(nbytes)
        link.sent += nbytes
        header = self._identity._replace(
            watermark=self.watermark,
            sequence=part.of.sequence,
            total_bytes=operation.view.nbytes,
            offset=offset,
            nbytes=nbytes,
            dtype=operation.dtype,
            op=operation.op,
            wire_dtype=operation.dtype,
            tag=operation.tag,
        )
        return Send(index, header.pack(), operation.view[offset : offset + nbytes])
