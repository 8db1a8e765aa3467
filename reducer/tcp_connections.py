"""What the kernel knows of a connection.

A descriptor may belong to another thread, which may close it at any time, and its number may be
given to another connection. So it is looked at through a duplicate.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

# struct tcp_info of linux/tcp.h: eight bytes, 24 numbers of 32 bits, two of 64, then newer ones.
_SHORTEST_ROUND_TRIP = 148
_TCP_INFO_BYTES = 152
_MICROSECONDS = struct.Struct("@I")
_UNKNOWN = 0xFFFFFFFF


def round_trip_s(connection: socket.socket) -> float:
    """Return the shortest round trip of a connection, seconds; 0 if the kernel cannot tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # it has ended, or is none of TCP's
        return 0.0
    if len(info) < _TCP_INFO_BYTES:
        return 0.0
    found = int(_MICROSECONDS.unpack_from(info, _SHORTEST_ROUND_TRIP)[0])
    return 0.0 if found == _UNKNOWN else found / 1e6


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
