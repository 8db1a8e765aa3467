"""The worker's end of the network: one connection per reducer, and what comes over it as events.

`compiled_transport` speaks ZMTP by itself and moves healthy messages without Python;
`plain_transport` has libzmq speak it, and moves every message in Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from reducer.clock import no_heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reducer.errors import AuthError
    from reducer.wire.header import Buffer
    from worker_client.protocol.flight import Resumption
    from worker_client.protocol.operation import Operation
    from worker_client.runtime import _loop

LOOK_S = 0.2  # how often to look when reducers were heard last
# A quarter of losses.ADOPT_S at most: whoever waits for any reducer tries each one several times.
RECONNECT_MS, RECONNECT_MAX_MS = 50, 500
CONNECT_S, HANDSHAKE_S = 2.0, 5.0  # for TCP's handshake, and for that and ZMTP's
LINGER_MS = 500  # for the farewell
SLAMMED = 3  # handshakes in a row that were ended without a word: not by chance


class Connected(NamedTuple):
    """A reducer was reached."""

    link: int


class Disconnected(NamedTuple):
    """A reducer was lost; the transport keeps trying to reach it again.

    Attributes:
        link: its index.
        reason: what the log says of the reducer.
        paused_s: for how long this process did not run before, if that was for longer than a
            reducer waits for a heartbeat; else 0.
    """

    link: int
    reason: str
    paused_s: float = 0.0


class Refused(NamedTuple):
    """A reducer does not accept our key, or that we have none; nothing is tried before a reset."""

    link: int
    error: AuthError


class Message(NamedTuple):
    """A reducer said something; the header frame is empty if it cannot be one of ours."""

    link: int
    header: Buffer
    payload: Buffer


class Completed(list[int]):
    """Numbers of all-reduces of which all results are in their buffers."""


Event = Connected | Disconnected | Refused | Message | Completed


class Transport(ABC):
    """Connections to all reducers of a job, and a way to wake up whoever polls them.

    One thread at a time uses it, but for `wake`. An event's `link` counts the connections in order.

    Attributes:
        loop: what moves its messages, if any thread may use it in turn; None if one alone may.
    """

    loop: _loop.Loop | None = None

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait for something to happen; at once after `wake`. An interrupt loses nothing."""

    @abstractmethod
    def events(self) -> Iterable[Event]:
        """Return what has happened; call it several times in `reducer.clock.MOST_S` seconds."""

    @abstractmethod
    def connect(self, address: str) -> None:
        """Add a link to a reducer, and connect to it until that succeeds.

        Args:
            address: ``host:port``, or the endpoint of a reducer in this process.
        """

    def keep(  # noqa: B027 (the plain one cannot)
        self, link: int, resumption: Resumption
    ) -> None:
        """Have a link's connections go on over others when they break, until the link ends.

        Args:
            link: that the reducer has welcomed.
            resumption: what the others begin with.
        """

    def add_streams(  # noqa: B027 (the plain one has none)
        self, link: int, header: bytes, payloads: Sequence[bytes]
    ) -> None:
        """Give a link further streams, until its first connection ends.

        Args:
            link: whose first connection the reducer has welcomed.
            header: of the messages with which they begin.
            payloads: of these, one for each.
        """

    @abstractmethod
    def reset(self, link: int) -> None:
        """Close a link's connections, drop what they have not sent, and connect anew.

        Nothing that was sent over it is read from callers' memory after this.
        """

    @abstractmethod
    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        """Send a message, of which nothing is read from the caller's memory after this.

        A message to a reducer that is not connected is lost: a `Disconnected` is on its way.
        """

    @abstractmethod
    def refill(self) -> None:
        """Send the contributions that the windows have room for."""

    @abstractmethod
    def detach(self, operation: Operation) -> None:
        """Read the buffer of a failed all-reduce no more."""

    @abstractmethod
    def listen(self) -> None:
        """Note when each reducer was heard last; close the connections to silent reducers.

        The driver calls it between events, several times in `reducer.clock.MOST_S`.
        """

    def round_trip_s(self, link: int) -> float:
        """Return the shortest round trip of a link's connection, seconds; 0 if nobody knows."""
        del link
        return 0.0

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return at once. The caller sees to it that one thread calls at a time."""

    def rest(  # noqa: B027 (the plain one has none)
        self, first_s: float, longest_s: float, longest_of_one_s: float
    ) -> None:
        """Return when no thread has called `wait` for a while, and after `resume`.

        For transports with a `loop`, as `resume`.

        Args:
            first_s: when to look for the first time, in seconds; then after twice as long each,
            longest_s: up to this,
            longest_of_one_s: or up to this, while one call of `wait` lasts.
        """

    def resume(self, *, at_once: bool = True) -> None:  # noqa: B027
        """Make `rest` return; any thread may call it, in any signal handler.

        Args:
            at_once: or let it begin anew, so that it looks again after `first_s`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the last messages a moment to leave, then free everything."""


def silence(silent_s: float) -> str:
    """Say why a connection to a reducer that was silent for so long was ended."""
    return f"died or cannot be reached: {no_heartbeat(silent_s)}"


HUNG_UP = "closed the connection, died or cannot be reached"
NO_REDUCER = "is not a reducer, or is shutting down"


def hung_up(link: int, paused_s: float, patience_s: float) -> Disconnected:
    """Say why a connection has ended at the reducer's end, or that it was this process's pause."""
    if paused_s <= patience_s:
        return Disconnected(link, HUNG_UP)
    why = f"ended the connection, as this process did not run for {paused_s:.1f} s"
    return Disconnected(link, why, paused_s)
