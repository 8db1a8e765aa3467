"""A reducer thread's end of the network, as the guard and the loops see it.

`compiled_transport` speaks ZMTP over sockets of its own, for the compiled loop; `plain_transport`
has libzmq speak it, for the plain one.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    import numpy as np

    from reducer.engine.slots import Member
    from reducer.wire.header import Buffer

LINGER_MS = 1000  # for the last results and farewells

# Why connections are refused, for the log.
UNKNOWN_KEY = "with a key that is not on the allow-list"
WITHOUT_KEY = "without a key"
OTHER_POOL = "with another pool's public key"
FOREIGN = "that do not speak this protocol"
HUNG_UP = "that hung up during the handshake"


class Transport(ABC):
    """A listening socket, and the connections that were made to it. One thread uses it.

    Attributes:
        frame_extra: bytes that encryption adds to each frame.
        inproc: the endpoint at which workers of this process connect that have the reducer's
            context, without a socket in between.
        host, port: where it listens.
    """

    frame_extra: int
    inproc: str
    host: str
    port: int

    @abstractmethod
    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Send a message.

        Returns:
            False if the peer is not connected any more.
        """

    @abstractmethod
    def connection(self, peer: bytes) -> int:
        """Return the connection of a peer, as of `changes`; 0 if it has none, or is in here."""

    @abstractmethod
    def moved(self, member: Member) -> tuple[int, int]:
        """Return the bytes on the wire that were taken from a member, and given to it."""

    @abstractmethod
    def changes(self) -> list[tuple[bool, int, int]]:
        """Say which connections came (True) or went since the last call.

        Each has its descriptor, which a later one may get as well, and a number of its own.
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
