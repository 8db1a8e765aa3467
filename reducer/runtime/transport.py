"""A reducer thread's end of the network: sockets of its own, over which `loop.c` speaks ZMTP."""

from __future__ import annotations

import errno
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reducer import tcp_connections
from reducer.clock import SPARE_ROUND_TRIPS, IdleTime
from reducer.errors import ConfigError
from reducer.runtime import _loop
from reducer.wire.constants import (
    HEADER_BYTES,
    LONGEST_PEER_TIMEOUT_MS,
    MAX_CHUNK_BYTES,
    REDUCER_HEARTBEAT_MS,
    RESUME_S,
    SHORTEST_PEER_TIMEOUT_MS,
)
from reducer.zmtp import z85

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from reducer.runtime.keyring import Keyring
    from reducer.wire.header import Buffer

BACKLOG = 1024  # connections that the kernel keeps until they are accepted
LINGER_MS = 1000  # for the last results and farewells
PARTIAL_BYTES = 1 << 10  # of a message that are more than heartbeats
NAMELESS = ("?", "?")  # one that has ended, or whose addresses take a file that is not left
HUNG_UP = "that hung up during the handshake"


class Load(NamedTuple):
    """What has come over a connection, and what its peer makes this reducer hold.

    Attributes:
        read: bytes that have come since it was made.
        unread: of these, bytes of a message that has begun.
        unsent: bytes that were given to it, and that the kernel has not taken.
        idle_s: for how long nothing has come, or no more of a message that has begun.
        round_trip_s: the connection's shortest, while it is silent; 0 if that is not known.
    """

    read: int
    unread: int
    unsent: int
    idle_s: float
    round_trip_s: float = 0.0


@dataclass(slots=True, eq=False)
class Line:
    """One connection of `_loop.Sockets`, as the guard sees it.

    Attributes:
        descriptor: of its socket.
        number: of it.
        idle_time: its peer's.
    """

    descriptor: int
    sockets: _loop.Sockets
    number: int
    idle_time: IdleTime

    def load(self, now: float) -> Load | None:
        """Return its load; None if it is gone.

        Args:
            now: seconds of a clock that stands still while this thread does not run.
        """
        found = self.sockets.load(self.number)
        if found is None:
            return None
        read, unread, unsent, waits = found
        idle_s = self.idle_time.listen(read, now, partial=unread >= PARTIAL_BYTES)
        if waits or idle_s < SHORTEST_PEER_TIMEOUT_MS / 1000:
            return Load(read, unread, unsent, 0.0 if waits else idle_s)
        far_s = tcp_connections.shortest_round_trip_s(self.descriptor)
        return Load(read, unread, unsent, idle_s, far_s)

    def bound(self, window: int) -> None:
        """Limit the bytes that the peer may have in flight; see `tcp_connections.bound`."""
        tcp_connections.bound_descriptor(self.descriptor, window)

    @property
    def name(self) -> tuple[object, ...]:
        """Both ends' addresses."""
        return tcp_connections.name(self.descriptor) or NAMELESS

    @property
    def suspended(self) -> bool:
        """Whether it has broken, and may go on over another one."""
        return self.sockets.is_suspended(self.number)

    def end(self) -> bool:
        """End it; return whether it was still there."""
        return self.sockets.hang_up(self.number)


class Transport:
    """A listening socket, and the connections that were made to it. One thread uses it.

    A peer's name is the number of its connection.

    Args:
        endpoint: ``tcp://HOST:PORT``; port 0 takes a free one.
        context: the reducer's, which takes up `meet`.
        keyring: the reducer's keys, and whom it admits, if peers must have some.
        max_chunk_bytes: the largest payload; who sends a larger one is disconnected.
        handshake_s: time for ZMTP's handshake.

    Attributes:
        sockets: what accepts, receives and sends.
        inproc: the endpoint at which workers of this process connect that have the reducer's
            context, without a socket in between.
        host, port: where it listens.

    Raises:
        ConfigError: the endpoint cannot be bound; the message says what to change.
    """

    def __init__(
        self,
        endpoint: str,
        context: dict[str, Callable[[], object]] | None = None,
        keyring: Keyring | None = None,
        *,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        handshake_s: float = 5.0,
    ) -> None:
        self._keyring = keyring
        keys = None
        if keyring is not None:
            pair = keyring.pair
            keys = z85.decode(pair.public), z85.decode(pair.secret)
        self._listener = _listen(endpoint)
        self.host, self.port = self._listener.getsockname()[:2]
        if self._listener.family == socket.AF_INET6:
            self.host = f"[{self.host}]"
        try:
            self.sockets = _loop.Sockets(
                self._listener.fileno(),
                REDUCER_HEARTBEAT_MS / 1000,
                handshake_s,
                max_chunk_bytes + HEADER_BYTES,
                keys,
            )
        except BaseException:
            self._listener.close()
            raise
        self._open: set[int] = set()  # connections
        self._refused: list[str] = []
        self._meeting = threading.Lock()
        self._closed = False
        self.inproc = f"pair://reducer-{id(self)}"
        if context is not None:
            context[self.inproc] = self.meet

    def meet(self) -> object:
        """Make a pair with a worker of this process; any thread may call this.

        Returns:
            What `_loop.Loop.join` of the worker takes, once; unused, it ends by itself.

        Raises:
            OSError: this end is closed, or no files are left.
        """
        with self._meeting:
            if self._closed:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "that reducer has ended")
            return self.sockets.meet()

    def limit(self, max_connections: int, max_open: int) -> None:
        """Accept no more connections than these; see `ConnectionLimits`."""
        self.sockets.limit(max_connections, max_open)

    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Send a message; return False if the peer is not connected any more."""
        return self.sockets.send(peer, header, payload)

    def connection(self, peer: bytes) -> int:
        """Return the number that `changes` gives a peer's connection.

        0 if the peer has none, or is in this process: of such connections `changes` says nothing.
        """
        number = int.from_bytes(peer, "little")
        return number if number in self._open else 0

    def hang_up(self, peer: bytes) -> None:
        """End the connection of a peer of this process, if it has one."""
        self.sockets.hang_up(int.from_bytes(peer, "little"))

    def changes(self, now: float) -> list[tuple[int, Line | None]]:
        """Say which connections came or went since the last call.

        Args:
            now: seconds of a clock that stands still while this thread does not run.

        Returns:
            The number of each, which no other one gets; and its line, None if it went.
        """
        changes: list[tuple[int, Line | None]] = []
        for came, descriptor, number in self.sockets.changes():
            if not came:
                self._open.discard(number)
                changes.append((number, None))
            else:
                self._open.add(number)
                changes.append((number, Line(descriptor, self.sockets, number, IdleTime(now))))
        return changes

    def refuse(self, why: str) -> None:
        """Record a connection that has ended in its handshake."""
        if self._keyring is not None:
            self._refused.append(why)

    def refusals(self) -> list[str]:
        """Say why connections were refused for want of a key since the last call, for each one."""
        self._refused += [HUNG_UP] * (self.sockets.unfinished() if self._keyring else 0)
        refused, self._refused = self._refused, []
        return refused

    def admits(self, key: bytes) -> bool:
        """Whether a public key may connect; what it may do then is the engine's business."""
        return self._keyring is not None and self._keyring.allowed.knows(self.text(key))

    @staticmethod
    def resume_s(descriptor: int) -> float:
        """Return for how long a member may go on with a connection that has broken, seconds."""
        far_s = tcp_connections.shortest_round_trip_s(descriptor)
        return min(RESUME_S + SPARE_ROUND_TRIPS * far_s, LONGEST_PEER_TIMEOUT_MS / 1000)

    @staticmethod
    def text(key: bytes) -> str:
        """Return a key of 32 bytes as it is written in files."""
        return z85.encode(key)

    def close(self) -> None:
        """Send nothing more; the last messages have a moment to leave."""
        with self._meeting:
            self._closed = True
        self.sockets.end(LINGER_MS)
        self._listener.close()


def _listen(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        number = int(port)
        if not 0 <= number < 1 << 16:
            raise ValueError(f"there is no port {number}")
        found = socket.getaddrinfo(
            host.strip("[]"), number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, place = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(place)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except socket.gaierror:
        raise ConfigError(_explain_bind(endpoint, errno.ENODEV, "no such host")) from None
    except ValueError as error:
        raise ConfigError(_explain_bind(endpoint, errno.EINVAL, str(error))) from None
    except OSError as error:
        raise ConfigError(_explain_bind(endpoint, error.errno or 0, str(error))) from None
    return listener


def _explain_bind(endpoint: str, number: int, said: str) -> str:
    """Say why an endpoint cannot be bound, and what to do.

    Args:
        endpoint: which.
        number: of the error, as in `errno`.
        said: the error in words.
    """
    reasons = {
        errno.EADDRINUSE: "the port is taken: stop the other program or choose another port "
        "(port 0 takes a free one)",
        errno.ENODEV: "this machine has no such address: use one of its own, or 127.0.0.1",
        errno.EADDRNOTAVAIL: "this machine has no such address: use one of its own, or 127.0.0.1",
        errno.EACCES: "ports below 1024 need privileges: choose a higher one",
        errno.EINVAL: "write it as tcp://HOST:PORT, with a port from 0 to 65535",
    }
    return f"cannot listen on {endpoint}: {reasons.get(number, said)}"
