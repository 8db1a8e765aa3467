"""What the kernel knows of a connection, and how much it lets the peer have under way.

A descriptor may belong to another thread, which may close it at any time, and its number may be
given to another connection. So it is looked at through a duplicate.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any, NamedTuple

from reducer.wire.constants import FAR_S

# struct tcp_info of linux/tcp.h: eight bytes, 24 numbers of 32 bits, two of 64, then newer ones.
_SCALES = 6  # of both windows, four bits each; the one of this end is above
_SEGMENT = 84
_SHORTEST_ROUND_TRIP = 148
_TCP_INFO_BYTES = 152
_NUMBER = struct.Struct("@I")
_UNKNOWN = 0xFFFFFFFF
_FEWEST_SEGMENTS = 2  # as many as TCP acknowledges at once
_FILLED = 0.9  # of a port, by what connections carry: headers take the rest


class Port(NamedTuple):
    """The port of the switch that leads to this process, where all who send to it meet.

    Attributes:
        nbytes: of its buffer, or of the part that is for this process; 0 if that is not known.
        ranks: of all jobs.
    """

    nbytes: int = 0
    ranks: int = 1

    def window(self, connections: int) -> int:
        """Return TCP's window of each connection, with which all have room in the port, bytes.

        As many as there are ranks have it at least: what a reducer has for them waits in its own
        card's queue, and acknowledgements of what they send to it behind that.

        Args:
            connections: of this process.
        """
        return int(_FILLED * self.nbytes) // max(self.ranks, connections, 1)


def round_trip_s(connection: socket.socket) -> float:
    """Return the shortest round trip of a connection, seconds; 0 if the kernel cannot tell."""
    return _round_trip_s(_look(connection))


def bound(connection: socket.socket, window: int) -> None:
    """Limit the bytes that the peer may have in flight on a connection, by TCP's receive window.

    Two segments at least. A connection whose round trip is a far network's keeps what that takes.
    The kernel forgets the bound when it makes the connection's buffer larger, and when the first
    whole segment comes: it is to be set again and again.
    """
    info = _look(connection)
    if not info or _round_trip_s(info) >= FAR_S:
        return
    step = 1 << (info[_SCALES] >> 4)  # the kernel rounds the window up to a multiple
    segments = _FEWEST_SEGMENTS * int(_NUMBER.unpack_from(info, _SEGMENT)[0])
    with contextlib.suppress(OSError):  # it has ended meanwhile
        most = max(window // step * step, segments)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, most)


def bound_descriptor(descriptor: int, window: int) -> None:
    """As `bound`, of a socket that may belong to another thread."""
    duplicate = _duplicate(descriptor)
    if duplicate is not None:
        with duplicate:
            bound(duplicate, window)


def shortest_round_trip_s(descriptor: int) -> float:
    """Return the shortest round trip of a socket, seconds; 0 if the kernel cannot tell."""
    duplicate = _duplicate(descriptor)
    if duplicate is None:
        return 0.0
    with duplicate:
        return round_trip_s(duplicate)


def name(descriptor: int) -> tuple[Any, ...] | None:
    """Return both ends' addresses, by which a connection is known again; None if there is none."""
    duplicate = _duplicate(descriptor)
    if duplicate is None:
        return None
    with duplicate:
        try:
            return (*duplicate.getsockname(), *duplicate.getpeername())
        except OSError:
            return None


def _look(connection: socket.socket) -> bytes:
    """Return what the kernel says of a connection; nothing if that is not all."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # it has ended, or is none of TCP's
        return b""
    return info if len(info) == _TCP_INFO_BYTES else b""


def _round_trip_s(info: bytes) -> float:
    if not info:
        return 0.0
    found = int(_NUMBER.unpack_from(info, _SHORTEST_ROUND_TRIP)[0])
    return 0.0 if found == _UNKNOWN else found / 1e6


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return what a descriptor stands for now, and hold on to it; None if that is no socket."""
    try:
        held = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=held)
    except OSError:
        os.close(held)
        return None
