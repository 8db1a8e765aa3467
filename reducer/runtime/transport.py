"""A reducer thread's end of the network, as the guard and the loops see it.

`compiled_transport` speaks ZMTP over sockets of its own, for the compiled loop; `plain_transport`
has libzmq speak it, for the plain one.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container

    import numpy as np

    from reducer.wire.header import Buffer

LINGER_MS = 1000  # for the last results and farewells

# Why connections are refused, for the log.
UNKNOWN_KEY = "with a key that is not on the allow-list"
WITHOUT_KEY = "without a key"
OTHER_POOL = "with another pool's public key"
FOREIGN = "that do not speak this protocol"
HUNG_UP = "that hung up during the handshake"


class Load(NamedTuple):
    """What has come over a connection, and what its peer makes this reducer hold.

    Attributes:
        read: bytes that have come since it was made.
        unread: of these, bytes that nobody has taken: the beginning of a message, or with libzmq
            whole ones as well.
        unsent: bytes that were given to it, and that the kernel has not taken.
        silent_s: for how long nothing has come, or no more of a message that has begun.
        progress: whether anything was taken since the load before.
        round_trip_s: the connection's shortest, while it is silent; 0 if that is not known.
    """

    read: int
    unread: int
    unsent: int
    silent_s: float
    progress: bool = True
    round_trip_s: float = 0.0


class Line(ABC):
    """One connection, as the guard sees it."""

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> tuple[object, ...]:
        """Both ends' addresses."""

    @property
    def suspended(self) -> bool:
        """Whether it has broken, and may go on over another one."""
        return False

    @abstractmethod
    def load(self, peer: bytes | None, now: float) -> Load | None:
        """Return its load; None if it is gone.

        Args:
            peer: the member whose connection it is; None if it is a stranger's.
            now: seconds of a clock that stands still while this thread does not run.
        """

    @abstractmethod
    def end(self) -> bool:
        """End it; return whether it was still there."""


class Transport(ABC):
    """A listening socket, and the connections that were made to it. One thread uses it.

    Attributes:
        inproc: the endpoint at which workers of this process connect that have the reducer's
            context, without a socket in between.
        host, port: where it listens.
    """

    inproc: str
    host: str
    port: int

    @abstractmethod
    def limit(self, max_connections: int, max_open: int) -> None:
        """Accept no more connections than these; see `Patience`."""

    @abstractmethod
    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Send a message.

        Returns:
            False if the peer is not connected any more.
        """

    @abstractmethod
    def connection(self, peer: bytes) -> int:
        """Return the number that `changes` gives a peer's connection.

        0 if the peer has none, or is in this process: of such connections `changes` says nothing.
        """

    @abstractmethod
    def hang_up(self, peer: bytes) -> None:
        """End the connection of a peer of this process, if it has one; libzmq's ends by itself."""

    @abstractmethod
    def changes(self, now: float) -> list[tuple[int, Line | None]]:
        """Say which connections came or went since the last call.

        Args:
            now: seconds of a clock that stands still while this thread does not run.

        Returns:
            The number of each, which no other one gets; and its line, None if it went.
        """

    @abstractmethod
    def refusals(self) -> list[str]:
        """Say why connections were refused for want of a key since the last call, for each one."""

    @abstractmethod
    def forget(self, members: Container[bytes]) -> None:
        """Forget peers that are no members, and whose connections have been gone for a while."""

    @abstractmethod
    def close(self) -> None:
        """Send nothing more; the last messages have a moment to leave."""


def explain_bind(endpoint: str, number: int, said: str) -> str:
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
