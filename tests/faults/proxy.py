"""A TCP proxy with faults that are switched on and off while it runs.

Workers connect to `Proxy.address` instead of the reducer. "up" is from the worker to the reducer,
"down" from the reducer to the worker. Every method may be called from any thread, and has taken
effect when it returns; what waits for its time notices within 10 ms.
"""

import asyncio
import fcntl
import socket
import struct
import termios
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

PIECE_BYTES = 1 << 18  # read at once, and on its way at a time
RECORD_BYTES = 1 << 16  # of which a duplicate is made
BACKLOG = 128
TICK_S = 0.01
CALL_S = 10.0  # the thread never waits for a peer: it answers, or is broken


class Torn(Exception):  # noqa: N818 (nobody's mistake: what was asked for)
    """A connection is to end here, in the middle of what it carries."""


@dataclass(eq=False)
class Shot:
    """A fault that happens once, at one byte of the first connection to pass bytes."""

    kind: str  # "flip", "duplicate", or "cut": a reset, when the peer has every byte before it
    offset: int = 0  # bytes that pass before it happens
    after: bytes = b""  # what passes before these, or nothing
    amount: int = 0  # a flip's bit, 0 the lowest; how many bytes pass again, up to 64 KiB
    fired: threading.Event = field(default_factory=threading.Event)
    pipe: object = None  # what it is going to hit, and at which byte, once that is known
    at: int = 0


class Proxy:
    """A proxy in front of one reducer, as a context manager; at its end all connections are reset.

    Args:
        target: the reducer's IPv4 ``host:port``.

    Attributes:
        address: where workers connect, ``127.0.0.1:PORT``.
        connections: accepted from workers.
        cuts: connections that `cut` has reset.
    """

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self.connections = self.cuts = 0
        self._target = host, int(port)
        self._lines = {"up": Line(), "down": Line()}
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
        return [pipe.passed for pipe in self._lines[way].pipes]

    def set(self, way, **faults):
        """Let faults last: attributes of the `Line` of a way, "up", "down" or "both"."""
        lines = self._lines.values() if way == "both" else [self._lines[way]]
        self._call(lambda: [vars(line).update(faults) for line in lines])

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
        if connection.cancelled() or error:  # peers see a reset, not the end of a stream
            for one in (worker, reducer):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker.close()
        reducer.close()
        if not isinstance(error, OSError | Torn | None):
            self._mistake = error  # in here, which no test may pass with


class Line:
    """What all connections of one direction share; used on the proxy's thread alone.

    Attributes:
        delay_s: so much later a piece is passed on, and then the next one is read.
        bytes_per_s: no faster are bytes read, of all connections together; None: as they come.
            Nothing is stored: what cannot pass stays with its sender.
        parted: nothing is passed on, neither bytes nor the end of a stream. Connections stay as
            they are; new ones are accepted, as a handshake that TCP goes on trying, but do not
            reach the reducer. What is held is passed on later, as TCP would send it again.
        shots: that have not been fired.
        pipes: of all connections that came.
    """

    delay_s = 0.0
    bytes_per_s = None
    parted = False

    def __init__(self):
        self.pipes = []
        self.shots = []
        self._free_at = 0.0  # when what was read will have left at the line's rate

    async def healed(self):
        while self.parted:
            await asyncio.sleep(TICK_S)

    async def carry(self, source):
        """Read what there is room for, and return it when it is to be passed on."""
        await self.healed()
        while self.bytes_per_s is not None and (wait := self._free_at - _now()) > 0:
            await asyncio.sleep(min(wait, TICK_S))
        rate = self.bytes_per_s
        most = PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, int(rate * TICK_S)))
        piece = await asyncio.get_running_loop().sock_recv(source, most)
        arrived = _now()
        if rate is not None:
            # A tick of arrears may be caught up on: timers are late.
            self._free_at = max(self._free_at, arrived - TICK_S) + len(piece) / rate
        while (wait := arrived + self.delay_s - _now()) > 0:
            await asyncio.sleep(min(wait, TICK_S))
        await self.healed()
        return piece


class Pipe:
    """One connection's bytes in one direction, of which so many have `passed`."""

    def __init__(self, line, source, sink):
        self.passed = 0
        line.pipes.append(self)
        self._line = line
        self._source = source
        self._sink = sink
        self._count = 0  # bytes of the source that have passed
        self._record = b""  # the last of them

    async def run(self):
        """Move bytes until the stream ends or the sink is gone, which the other pipe then reads.

        Raises:
            OSError: the source was reset.
            Torn: a shot ends the connection; every byte before it has reached the sink.
        """
        try:
            while piece := await self._line.carry(self._source):
                with suppress(OSError):
                    await self._pass_on(piece)
                    continue
                return
            with suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)
        finally:
            for shot in self._line.shots:
                if shot.pipe is self:
                    shot.pipe = None  # it hits another connection

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
