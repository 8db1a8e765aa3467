"""What a transport says has happened to the connections of a job, and in which words.

An event's `link` counts the connections in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reducer.clock import no_heartbeat

if TYPE_CHECKING:
    from reducer.errors import AuthError
    from reducer.wire.header import Buffer
    from worker_client.protocol.operation import Operation


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


class Completed(list["Operation"]):
    """All-reduces of which all results are in their buffers."""


Event = Connected | Disconnected | Refused | Message | Completed


def timed_out(idle_s: float) -> str:
    """Say why a connection to a reducer that was silent for so long was ended."""
    return f"died or cannot be reached: {no_heartbeat(idle_s)}"


HUNG_UP = "closed the connection, died or cannot be reached"
NO_REDUCER = "is not a reducer, or is shutting down"


def hung_up(link: int, paused_s: float, patience_s: float) -> Disconnected:
    """Say why a connection has ended at the reducer's end, or that it was this process's pause."""
    if paused_s <= patience_s:
        return Disconnected(link, HUNG_UP)
    why = f"ended the connection, as this process did not run for {paused_s:.1f} s"
    return Disconnected(link, why, paused_s)
