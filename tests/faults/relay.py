"""The proxy's thread: it accepts connections, joins each with one to the target, and ends them."""

import asyncio
import socket
import struct
import threading
from functools import partial

from tests.faults.stream import Line, Pipe, Torn, ready

BACKLOG = 128
CALL_S = 10.0  # the thread never waits for a peer: it answers, or is broken


class Relay:
    """An event loop on a thread of its own, and what runs there.

    Args:
        target: host and port of the reducer.
        seed: of the jitter.

    Attributes:
        port: where it listens on 127.0.0.1.
        lines: both directions; changed on the thread alone.
        accepted, cuts: connections that came, and that `cut` has reset.
    """

    def __init__(self, target, seed):
        # Bound but deaf: it keeps the port ours while connections are refused.
        self._holder = _bound(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]
        self.lines = {"up": Line(seed), "down": Line(seed + 1)}
        self.accepted = self.cuts = 0
        self._target = target
        self._acceptor = None
        self._connections = {}  # the oldest first
        self._failure = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {self.port}")
        self._thread.start()

    def call(self, work):
        """Do something on the thread, and return what comes out when it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def close(self):
        """Reset every connection and end the thread.

        Raises:
            BaseException: a mistake in here had ended a connection.
        """
        try:
            self.call(self.refuse())
            self.call(self.cut())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._holder.close()
        if self._failure is not None:
            raise self._failure

    async def refuse(self):
        """Stop listening; what waits to be accepted is refused too."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.cancel()
            await asyncio.gather(acceptor, return_exceptions=True)

    async def restore(self):
        """End every fault, and listen."""
        for line in self.lines.values():
            line.restore()
        if self._acceptor is None:
            listener = _bound(self._holder.getsockname())
            listener.listen(BACKLOG)
            self._acceptor = asyncio.create_task(self._accept(listener))

    async def cut(self, latest=None):
        """Reset all connections, or as many of the latest."""
        connections = list(self._connections)[-latest if latest else 0 :]
        self.cuts += len(connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, listener):
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:  # nothing is awaited in between: no accepted socket is lost
                    worker, _ = listener.accept()
                except BlockingIOError:
                    await ready(listener, loop.add_reader, loop.remove_reader)
                    continue
                self.accepted += 1
                reducer = socket.socket()
                connection = asyncio.create_task(self._serve(worker, reducer))
                self._connections[connection] = None
                connection.add_done_callback(partial(self._ended, worker, reducer))

    async def _serve(self, worker, reducer):
        for one in (worker, reducer):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = self.lines["up"], self.lines["down"]
        while shut := [line for line in (up, down) if not line.open.is_set()]:
            await shut[0].open.wait()
        await asyncio.get_running_loop().sock_connect(reducer, self._target)
        pipes = Pipe(up, worker, reducer), Pipe(down, reducer, worker)
        tasks = [asyncio.create_task(pipe.run()) for pipe in pipes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, worker, reducer, connection):
        self._connections.pop(connection, None)
        error = None if connection.cancelled() else connection.exception()
        if connection.cancelled() or error is not None:
            _reset(worker, reducer)
        worker.close()
        reducer.close()
        if not isinstance(error, OSError | Torn | None):
            self._failure = error  # a mistake in here, which no test may pass with


def _reset(*sockets):
    """Close sockets so that their peers see a reset, not the end of a stream."""
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()


def _bound(address):
    """Return a socket at an address that others of ours may share, as long as one alone listens."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    bound.setblocking(False)
    return bound
