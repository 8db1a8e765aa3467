"""The transport of the compiled loop: sockets of its own, over which `loop.c` speaks ZMTP."""

from __future__ import annotations

import errno
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reducer import tcp_connections
from reducer.clock import SPARE_ROUND_TRIPS, Silence
from reducer.errors import ConfigError
from reducer.runtime import _loop
from reducer.runtime.transport import HUNG_UP, LINGER_MS, Line, Load, Transport, explain_bind
from reducer.wire.constants import (
    HEADER_BYTES,
    LONGEST_PATIENCE_MS,
    MAX_CHUNK_BYTES,
    REDUCER_HEARTBEAT_MS,
    RESUME_S,
    SHORTEST_PATIENCE_MS,
)
from reducer.zmtp import z85

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    import numpy as np

    from reducer.runtime.keyring import Keyring
    from reducer.wire.header import Buffer

BACKLOG = 1024  # connections that the kernel keeps until they are accepted
NAMELESS = ("?", "?")  # one that has ended, or whose addresses take a file that is not left


@dataclass(slots=True, eq=False)
class _Line(Line):
    """One connection of `_loop.Sockets`."""

    descriptor: int
    sockets: _loop.Sockets
    number: int
    silence: Silence

    def load(self, peer: bytes | None, now: float) -> Load | None:
        del peer
        found = self.sockets.load(self.number)
        if found is None:
            return None
        read, unread, unsent, waits = found
        silent_s = self.silence.listen(read, now, partial=unread >= tcp_connections.PARTIAL_BYTES)
        if waits or silent_s < SHORTEST_PATIENCE_MS / 1000:
            return Load(read, unread, unsent, 0.0 if waits else silent_s)
        far_s = tcp_connections.shortest_round_trip_s(self.descriptor)
        return Load(read, unread, unsent, silent_s, round_trip_s=far_s)

    @property
    def name(self) -> tuple[object, ...]:
        return tcp_connections.name(self.descriptor) or NAMELESS

    @property
    def suspended(self) -> bool:
        return self.sockets.is_suspended(self.number)

    def end(self) -> bool:
        return self.sockets.hang_up(self.number)


class CompiledTransport(Transport):
    """Connections that `_loop.Sockets` accepts; see `Transport`.

    A peer's name is the number of its connection. A `context` takes up `meet` for workers of this
    process; a `keyring` is there if peers must have keys; who sends a payload of more than
    `max_chunk_bytes` is disconnected, or whose handshake takes more than `handshake_s`.

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
        self.sockets.limit(max_connections, max_open)

    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        return self.sockets.send(peer, header, payload)

    def connection(self, peer: bytes) -> int:
        number = int.from_bytes(peer, "little")
        return number if number in self._open else 0

    def hang_up(self, peer: bytes) -> None:
        self.sockets.hang_up(int.from_bytes(peer, "little"))

    def changes(self, now: float) -> list[tuple[int, Line | None]]:
        changes: list[tuple[int, Line | None]] = []
        for came, descriptor, number in self.sockets.changes():
            if not came:
                self._open.discard(number)
                changes.append((number, None))
            else:
                self._open.add(number)
                changes.append((number, _Line(descriptor, self.sockets, number, Silence(now))))
        return changes

    def refuse(self, why: str) -> None:
        """Take note of a connection that has ended in its handshake."""
        if self._keyring is not None:
            self._refused.append(why)

    def refusals(self) -> list[str]:
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
        return min(RESUME_S + SPARE_ROUND_TRIPS * far_s, LONGEST_PATIENCE_MS / 1000)

    @staticmethod
    def text(key: bytes) -> str:
        """Return a key of 32 bytes as it is written in files."""
        return z85.encode(key)

    def forget(self, members: Container[bytes]) -> None:
        """Do nothing: a connection that ends is forgotten at once."""

    def close(self) -> None:
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
    except (OSError, ValueError) as error:
        reason = errno.EINVAL if isinstance(error, ValueError) else error.errno or 0
        if isinstance(error, socket.gaierror):
            reason = errno.ENODEV
        raise ConfigError(explain_bind(endpoint, reason, str(error))) from None
    return listener
