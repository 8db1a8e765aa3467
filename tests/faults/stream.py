"""One direction of one proxied connection, and the faults that its bytes meet on the way.

A `Line` is what all connections of a direction share: the faults that last, and the shots. A `Pipe`
moves one connection's bytes: it reads at the line's rate into a bounded queue, and writes when a
piece is due, the line is open, and the shots have had their say.
"""

import asyncio
import fcntl
import random
import socket
import termios
import threading
from dataclasses import dataclass, field
from typing import Literal

PIECE_BYTES = 1 << 16  # read at once
QUEUE_PIECES = 64  # then nothing more is read: 4 MiB, which a delay of 50 ms needs at 80 MB/s
RECORD_BYTES = 1 << 16  # the last bytes that passed, of which a duplicate is made
TICK_S = 0.01  # a change reaches what waits for its time within this


class Torn(Exception):  # noqa: N818 (nobody's mistake: what was asked for)
    """A connection is to end here, in the middle of what it carries."""


@dataclass(eq=False)
class Shot:
    """A fault that happens once, at one byte of one connection.

    The first connection to pass bytes is hit or, if `after` is given, the first to pass those.

    Attributes:
        kind: what happens.
        offset: bytes that pass before it does.
        after: bytes of the stream from whose end on is counted; empty: from the next byte on.
        amount: of a flip, the bit's number, 0 the lowest; of a duplicate, bytes to repeat.
        fired: set when it has happened.
        pipe: what it is going to hit, once that is known.
        left: bytes that still pass there before.
    """

    kind: Literal["flip", "duplicate", "cut"]
    offset: int
    after: bytes = b""
    amount: int = 0
    fired: threading.Event = field(default_factory=threading.Event)
    pipe: "Pipe | None" = None
    left: int = 0

    @property
    def needs(self):
        """Bytes that must be at hand: a flip changes the next one, the others come before it."""
        return 1 if self.kind == "flip" else 0


class Line:
    """What all connections of one direction share; used on the proxy's thread alone.

    Args:
        seed: of the jitter.
    """

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._free_at = 0.0  # when what was read will have left at the line's rate
        self.open = asyncio.Event()  # not set: a partition
        self.shots = []
        self.passed = self.flips = self.duplicated = self.cuts = 0
        self.pipes = []  # of all connections that came
        self.restore()

    def restore(self):
        """End every fault; shots that have not been fired never are."""
        self.delay_s = self.jitter_s = 0.0
        self.bytes_per_s = None
        self.open.set()
        self.shots.clear()

    def draw(self):
        """Return how much of the jitter the next piece has."""
        return self._random.random()

    async def allowance(self):
        """Wait until the line may carry more, and return how many bytes may be read at once."""
        await self.open.wait()
        while self.bytes_per_s is not None and (wait := self._free_at - _now()) > 0:
            await asyncio.sleep(min(wait, TICK_S))
        if self.bytes_per_s is None:
            return PIECE_BYTES
        return max(1, min(PIECE_BYTES, int(self.bytes_per_s * TICK_S)))

    def spend(self, nbytes):
        """Take note that so many bytes were read."""
        if self.bytes_per_s is not None:
            # A tick of arrears may be caught up on: timers are late.
            self._free_at = max(self._free_at, _now() - TICK_S) + nbytes / self.bytes_per_s

    async def due(self, arrived, drawn):
        """Wait until a piece that was read at `arrived` is to be passed on."""
        while (wait := arrived + self.delay_s + drawn * self.jitter_s - _now()) > 0:
            await asyncio.sleep(min(wait, TICK_S))


class Pipe:
    """One connection's bytes in one direction.

    Args:
        line: what it shares with the other connections of this direction.
        source, sink: non-blocking sockets.

    Attributes:
        passed: bytes that it has passed on.
    """

    def __init__(self, line, source, sink):
        self.passed = 0
        line.pipes.append(self)
        self._line = line
        self._source = source
        self._sink = sink
        # When it was read, how much jitter it has, and the bytes: none at the end, None at a reset.
        self._queue = asyncio.Queue(QUEUE_PIECES)
        self._record = b""

    async def run(self):
        """Move bytes until the stream ends or the sink is gone, which the other pipe then reads.

        Raises:
            ConnectionResetError: the source was reset.
            Torn: a shot ends the connection; every byte before it has reached the sink.
        """
        reader = asyncio.create_task(self._read())
        try:
            await self._write()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            for shot in self._line.shots:
                if shot.pipe is self:
                    shot.pipe = None  # it hits another connection

    async def _read(self):
        loop = asyncio.get_running_loop()
        piece = b"-"
        while piece:
            allowed = await self._line.allowance()
            try:  # nothing is awaited in between: what is read is what is allowed now
                piece = self._source.recv(allowed)
            except BlockingIOError:
                await ready(self._source, loop.add_reader, loop.remove_reader)
                continue
            except OSError:
                piece = None
            self._line.spend(len(piece or b""))
            await self._queue.put((_now(), self._line.draw(), piece))

    async def _write(self):
        while True:
            arrived, drawn, piece = await self._queue.get()
            await self._line.due(arrived, drawn)
            await self._line.open.wait()
            if piece is None:
                raise ConnectionResetError
            try:
                if not piece:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                await self._pass_on(piece)
            except OSError:
                return

    async def _pass_on(self, piece):
        while (shot := self._next_shot(piece)) is not None:
            before, piece = piece[: shot.left], piece[shot.left :]
            self._line.shots.remove(shot)
            await self._advance(before)
            if shot.kind == "flip":
                piece = bytes([piece[0] ^ 1 << shot.amount]) + piece[1:]
                self._line.flips += 1
            elif shot.kind == "duplicate":
                await self._send(self._record[-shot.amount :])
                self._line.duplicated += shot.amount
            else:
                await self._drain()
                self._line.cuts += 1
                shot.fired.set()
                raise Torn
            shot.fired.set()
        await self._advance(piece)

    def _next_shot(self, piece):
        """Return the first shot that hits this piece; its `left` says where."""
        for shot in self._line.shots:
            if shot.pipe is None and (start := self._end_of(shot.after, piece)) is not None:
                shot.pipe = self
                shot.left = start + shot.offset
        mine = (shot for shot in self._line.shots if shot.pipe is self)
        due = (shot for shot in mine if shot.left + shot.needs <= len(piece))
        return min(due, key=lambda shot: shot.left, default=None)

    def _end_of(self, pattern, piece):
        if not pattern:
            return 0
        before = self._record[1 - len(pattern) :] if len(pattern) > 1 else b""
        at = (before + piece).find(pattern)
        return None if at < 0 else at + len(pattern) - len(before)

    async def _advance(self, data):
        """Send what the shots leave alone, and count it for them."""
        await self._send(data)
        for shot in self._line.shots:
            if shot.pipe is self:
                shot.left -= len(data)
        self._record = (self._record + data)[-RECORD_BYTES:]

    async def _send(self, data):
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        while view:
            await self._line.open.wait()
            try:  # nothing is awaited in between: once the line is shut, not a byte passes
                sent = self._sink.send(view)
            except BlockingIOError:
                await ready(self._sink, loop.add_writer, loop.remove_writer)
                continue
            self._line.passed += sent
            self.passed += sent
            view = view[sent:]

    async def _drain(self):
        """Wait until the peer's kernel has everything, which a reset would else throw away."""
        while fcntl.ioctl(self._sink, termios.TIOCOUTQ, bytes(4)) != bytes(4):
            await asyncio.sleep(TICK_S / 10)


async def ready(one, add, remove):
    """Wait until a socket can be read or written, as `add` says."""
    event = asyncio.Event()
    add(one, event.set)
    try:
        await event.wait()
    finally:
        remove(one)


def _now():
    return asyncio.get_running_loop().time()
