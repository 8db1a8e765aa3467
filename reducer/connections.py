"""What the kernel knows of a reducer's connections, and how one of them is ended.

libzmq tells neither how much it holds for a peer nor how to close one connection of a ROUTER
socket. The kernel counts a connection's bytes, and can end it under libzmq's hands, which then
closes it. Descriptors belong to libzmq: another thread may close one at any time, and its number
may be given to another connection. So nothing is trusted that was read from a number alone, and
one is ended through a duplicate that was found to be the connection that was meant.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from typing import NamedTuple

# struct tcp_info of linux/tcp.h: eight bytes, 24 numbers of 32 bits, two of 64, then these.
_HEARD, _ACKED, _RECEIVED = 52, 120, 128
_TCP_INFO_BYTES = 136
_COUNT = struct.Struct("@Q")
_MILLISECONDS = struct.Struct("@I")
_QUEUE = struct.Struct("@i")


class Traffic(NamedTuple):
    """What has passed between libzmq and the kernel since a connection was made.

    Attributes:
        read: bytes by libzmq, from the peer.
        written: bytes by libzmq, to the peer.
        silent_s: since bytes have come from the peer; 0 if there are some that libzmq has not read.
    """

    read: int
    written: int
    silent_s: float = 0.0


def name(descriptor: int) -> tuple[object, ...] | None:
    """Return both ends' addresses, by which a connection is known again; None if there is none."""
    duplicate = _duplicate(descriptor)
    if duplicate is None:
        return None
    with duplicate:
        return _ends(duplicate)


def traffic(descriptor: int, expected: tuple[object, ...]) -> Traffic | None:
    """Return what has passed over a connection.

    What passes meanwhile can make `read` too large and `written` too small.

    Args:
        descriptor: its number.
        expected: its `name`.

    Returns:
        None if that connection is gone, or the kernel cannot tell.
    """
    duplicate = _duplicate(descriptor)
    if duplicate is None:
        return None
    with duplicate:
        if _ends(duplicate) != expected:
            return None
        try:
            unread = _queue(duplicate.fileno(), termios.FIONREAD)
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) < _TCP_INFO_BYTES:
                return None
            unsent = _queue(duplicate.fileno(), termios.TIOCOUTQ)
        except OSError:
            return None
    received, acknowledged = _count(info, _RECEIVED), _count(info, _ACKED)
    silent_ms = 0 if unread else int(_MILLISECONDS.unpack_from(info, _HEARD)[0])
    return Traffic(max(0, received - unread), acknowledged + unsent, silent_ms / 1000)


def end(descriptor: int, expected: tuple[object, ...]) -> bool:
    """End a connection; libzmq sees that and closes it.

    Args:
        descriptor: its number.
        expected: its `name`.

    Returns:
        False if that connection is gone; whatever has its number now is left alone.
    """
    duplicate = _duplicate(descriptor)
    if duplicate is None:
        return False
    with duplicate:
        if _ends(duplicate) != expected:
            return False
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # the peer was faster
    return True


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


def _ends(connection: socket.socket) -> tuple[object, ...] | None:
    try:
        return (*connection.getsockname(), *connection.getpeername())
    except OSError:
        return None


def _queue(descriptor: int, which: int) -> int:
    return int(_QUEUE.unpack(fcntl.ioctl(descriptor, which, bytes(_QUEUE.size)))[0])


def _count(info: bytes, offset: int) -> int:
    return int(_COUNT.unpack_from(info, offset)[0])
