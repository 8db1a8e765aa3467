"""A TCP proxy with faults that are switched on and off while it runs.

Workers connect to `Proxy.address` instead of the reducer. "up" is from the worker to the reducer,
"down" from the reducer to the worker. Every method may be called from any thread, and has taken
effect when it returns; what waits for its time notices within 10 ms.
"""

import asyncio
import fcntl
import random
import socket
import struct
import termios
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

PIECE_BYTES = 1 << 16  # read at once
QUEUE_PIECES = 64  # then nothing more is read: 4 MiB, which a delay of 50 ms needs at 80 MB/s
RECORD_BYTES = 1 << 16  # of which a duplicate is made
BACKLOG = 128
TICK_S = 0.01
CALL_S = 10.0  # the thread never waits for a peer: it answers, or is broken


class Torn(Exception):  # noqa: N818 (nobody's mistake: what was asked for)
    """A connection is to end here, in the middle of what it carries."""


@dataclass(eq=False)
class Shot:
    """A fault that happens once, at one byte of one connection.

    The first connection to pass bytes is hit or, if `after` is given, the first to pass those.

    Attributes:
        kind: what happens. A cut is a reset, when the peer has every byte before it.
        offset: bytes that pass before it does.
        after: bytes of the stream from whose end on is counted; empty: from the next byte on.
        amount: of a flip, the bit's number, 0 the lowest; of a duplicate, how many of the latest
            bytes pass again, up to 64 KiB.
        fired: set when it has happened.
        pipe: what it is going to hit, and `at` which byte, once that is known.
    """

    kind: Literal["flip", "duplicate", "cut"]
    offset: int = 0
    after: bytes = b""
    amount: int = 0
    fired: threading.Event = field(default_factory=threading.Event)
    pipe: "Pipe | None" = None
    at: int = 0


class Proxy:
    """A proxy in front of one reducer, as a context manager; at its end all connections are reset.

    Args:
        target: the reducer's IPv4 ``host:port``.
        seed: of the jitter.

    Attributes:
        address: where workers connect, ``127.0.0.1:PORT``.
        connections: accepted from workers.
        cuts: connections that it has reset.
    """

    def __init__(self, target, seed=0):
        host, _, port = target.rpartition(":")
        self.connections = self.cuts = 0
        self._target = host, int(port)
        self._lines = {"up": Line(seed), "down": Line(seed + 1)}
        self._open = {}  # tasks of connections, the oldest first
        self._mistake = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy of {target}")

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._loop.add_reader(self._listener, self._accept)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        try:
            self._call(self._loop.remove_reader, self._listener)
            self.cut()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._listener.close()
        if self._mistake is not None:
            raise self._mistake

    def passed(self, way):
        """Return how many bytes each connection has passed on, in the order in which they came."""
        return self._call(lambda: [pipe.passed for pipe in self._lines[way].pipes])

    def set(self, way, **faults):
        """Let faults last: attributes of the `Line` of a way, "up", "down" or "both"."""
        lines = self._lines.values() if way == "both" else [self._lines[way]]
        self._call(lambda: [vars(line).update(faults) for line in lines])

    def restore(self):
        """End every fault; shots not yet fired never are."""
        self._call(lambda: [line.restore() for line in self._lines.values()])

    def shoot(self, way, kind, offset=0, **shot):
        """Have a fault happen once, as `Shot` says; return an event that is set when it has."""
        made = Shot(kind, offset, **shot)
        self._call(self._lines[way].shots.append, made)
        return made.fired

    def cut(self, latest=0):
        """Reset all connections, or as many of the latest."""

        async def cut():
            connections = list(self._open)[-latest:]
            self.cuts += len(connections)
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(CALL_S)

    # -- on its thread ----------------------------------------------------------------------------

    def _call(self, work, *arguments):
        async def call():
            return work(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(CALL_S)

    def _accept(self):
        worker, _ = self._listener.accept()
        self.connections += 1
        reducer = socket.socket()
        connection = self._loop.create_task(self._serve(worker, reducer))
        self._open[connection] = None
        connection.add_done_callback(partial(self._ended, worker, reducer))

    async def _serve(self, worker, reducer):
        for one in (worker, reducer):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = self._lines["up"], self._lines["down"]
        while up.parted or down.parted:
            await asyncio.sleep(TICK_S)
        await self._loop.sock_connect(reducer, self._target)
        pipes = Pipe(up, worker, reducer), Pipe(down, reducer, worker)
        tasks = [asyncio.create_task(pipe.run()) for pipe in pipes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, worker, reducer, connection):
        del self._open[connection]
        error = None if connection.cancelled() else connection.exception()
        if (
            connection.cancelled() or error is not None
        ):  # peers see a reset, not the end of a stream
            for one in (worker, reducer):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker.close()
        reducer.close()
        self.cuts += isinstance(error, Torn)
        if not isinstance(error, OSError | Torn | None):
            self._mistake = error  # in here, which no test may pass with


class Line:
    """What all connections of one direction share; used on the proxy's thread alone.

    Attributes:
        delay_s: so much later bytes are passed on, in order.
        jitter_s: up to so much more, drawn evenly for each piece that is read.
        bytes_per_s: no faster are bytes read, of all connections together; None: as they come.
            Nothing is stored: what cannot pass stays with its sender.
        parted: nothing is passed on, neither bytes nor the end of a stream. Connections stay as
            they are; new ones are accepted, as a handshake that TCP goes on trying, but do not
            reach the reducer. What is held is passed on later, as TCP would send it again.
        shots: that have not been fired.
        pipes: of all connections that came.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pipes = []
        self.shots = []
        self._free_at = 0.0  # when what was read will have left at the line's rate
        self.restore()

    def restore(self):
        """End every fault."""
        self.delay_s = self.jitter_s = 0.0
        self.bytes_per_s = None
        self.parted = False
        self.shots.clear()

    async def healed(self):
        """Wait until the line is not parted."""
        while self.parted:
            await asyncio.sleep(TICK_S)

    async def allowance(self):
        """Wait until the line may carry more, and return how many bytes may be read at once."""
        await self.healed()
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
        await self.healed()


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
        self._count = 0  # bytes of the source that have passed
        self._record = b""  # the last of them

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
        piece = b"-"
        while piece:
            allowed = await self._line.allowance()
            try:
                piece = await asyncio.get_running_loop().sock_recv(self._source, allowed)
            except OSError:
                piece = None
            self._line.spend(len(piece or b""))
            await self._queue.put((_now(), self._line.random.random(), piece))

    async def _write(self):
        while True:
            arrived, drawn, piece = await self._queue.get()
            await self._line.due(arrived, drawn)
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
            before, piece = piece[: shot.at - self._count], piece[shot.at - self._count :]
            self._line.shots.remove(shot)
            await self._advance(before)
            if shot.kind == "flip":
                piece = bytes([piece[0] ^ 1 << shot.amount]) + piece[1:]
            elif shot.kind == "duplicate":
                await self._send(self._record[-shot.amount :])
            else:  # the peer's kernel gets everything first, which a reset would else throw away
                while fcntl.ioctl(self._sink, termios.TIOCOUTQ, bytes(4)) != bytes(4):
                    await asyncio.sleep(TICK_S / 10)
                shot.fired.set()
                raise Torn
            shot.fired.set()
        await self._advance(piece)

    def _next_shot(self, piece):
        """Return the first shot that hits this piece; a flip needs the byte that it changes."""
        for shot in self._line.shots:
            begun = max(0, min(len(shot.after) - 1, len(self._record)))
            known = self._record[len(self._record) - begun :] + piece
            if shot.pipe is None and (found := known.find(shot.after)) >= 0:
                shot.pipe = self
                shot.at = self._count - begun + found + len(shot.after) + shot.offset
        end = self._count + len(piece)
        mine = [shot for shot in self._line.shots if shot.pipe is self]
        due = [shot for shot in mine if shot.at + (shot.kind == "flip") <= end]
        return min(due, key=lambda shot: shot.at, default=None)

    async def _advance(self, data):
        await self._send(data)
        self._count += len(data)
        self._record = (self._record + data)[-RECORD_BYTES:]

    async def _send(self, data):
        view = memoryview(data)
        while view:
            await self._line.healed()
            try:  # nothing is awaited in between: once the line is parted, not a byte passes
                sent = self._sink.send(view)
            except BlockingIOError:
                await _writable(self._sink)
                continue
            self.passed += sent
            view = view[sent:]


async def _writable(one):
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(one, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_writer(one)


def _now():
    return asyncio.get_running_loop().time()
