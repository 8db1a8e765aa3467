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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.clock import HEARTBEATS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

CURVE_FRAME_BYTES = 33  # that CURVE adds to each frame: a command's name, a nonce, flags, a MAC
PARTIAL_BYTES = 1 << 10  # of a message that are more than heartbeats

# struct tcp_info of linux/tcp.h: eight bytes, 24 numbers of 32 bits, two of 64, then these. The
# last one is newer than the others.
_HEARD, _ACKED, _RECEIVED = 52, 120, 128
_TCP_INFO_BYTES = 136
_SHORTEST_ROUND_TRIP = 148
_WHOLE_TCP_INFO_BYTES = 152
_COUNT = struct.Struct("@Q")
_MILLISECONDS = _MICROSECONDS = struct.Struct("@I")
_UNKNOWN = 0xFFFFFFFF
_QUEUE = struct.Struct("@i")


class Traffic(NamedTuple):
    """What has passed between libzmq and the kernel since a connection was made.

    Attributes:
        read: bytes by libzmq, from the peer.
        written: bytes by libzmq, to the peer.
        silent_s: since bytes have come from the peer; 0 if there are some that libzmq has not read.
        round_trip_s: the shortest; 0 if the kernel cannot tell.
    """

    read: int
    written: int
    silent_s: float = 0.0
    round_trip_s: float = 0.0


@dataclass(slots=True, eq=False)
class Reception:
    """What comes over a connection, and since when nothing whole has.

    Attributes:
        descriptor: libzmq's number for it.
        name: both ends' addresses.
        looked: when it was looked at last, in seconds of a clock that stands still while this
            process does not run.
        heard: when something had come from the peer, as far as is known, by that clock. A process
            that did not run could hear nobody, so what the kernel says of that time does not count.
        silent_s: since then at that look, or since more of a message had come that is not whole.
        round_trip_s: as of `Traffic`, at that look.
        whole: when that was, or nothing was known to be missing of one.
        unread: bytes that libzmq had read from the peer then, and nobody had taken.
        beyond: bytes read that were no messages, as heartbeats are.
        taken: bytes that had been taken by then.
    """

    descriptor: int
    name: tuple[object, ...]
    looked: float = 0.0
    heard: float = 0.0
    silent_s: float = 0.0
    round_trip_s: float = 0.0
    whole: float = 0.0
    unread: int = 0
    beyond: float = 0.0
    taken: int = -1

    def listen(self, passed: Traffic, taken: int, now: float) -> bool:
        """Find out how long the peer has been silent.

        Args:
            passed: between libzmq and the kernel.
            taken: bytes on the wire of the messages that libzmq has given out.
            now: as `looked`.

        Returns:
            Whether anything was taken since the last time.
        """
        # Heartbeats are no messages, and are allowed as they come: what a peer does not use of
        # that is not saved up for what it may leave unread later.
        heartbeats = HEARTBEATS_PER_S * (now - self.looked)
        self.beyond = min(passed.read - taken, self.beyond + heartbeats)
        before, self.unread = self.unread, int(passed.read - taken - self.beyond)
        progress, self.taken = taken != self.taken, taken
        if progress or self.unread < PARTIAL_BYTES or self.unread > before:
            self.whole = now
        self.heard = max(self.heard, now - passed.silent_s)
        self.silent_s = now - min(self.heard, self.whole)
        self.round_trip_s = passed.round_trip_s
        self.looked = now
        return progress


def wire_bytes(sizes: Iterable[int], extra: int) -> int:
    """Return what frames of these sizes take on the wire (ZMTP 3.1, section "Framing").

    Args:
        sizes: bytes of each frame.
        extra: what encryption adds to each.
    """
    lengths = [size + extra for size in sizes]
    return sum(length + (9 if length > 255 else 2) for length in lengths)


def round_trip_s(connection: socket.socket) -> float:
    """Return the shortest round trip of a connection, seconds; 0 if the kernel cannot tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WHOLE_TCP_INFO_BYTES)
    except OSError:  # it has ended, or is none of TCP's
        return 0.0
    return _round_trip_s(info)


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
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WHOLE_TCP_INFO_BYTES)
            if len(info) < _TCP_INFO_BYTES:
                return None
            unsent = _queue(duplicate.fileno(), termios.TIOCOUTQ)
        except OSError:
            return None
    received, acknowledged = _count(info, _RECEIVED), _count(info, _ACKED)
    silent_ms = 0 if unread else int(_MILLISECONDS.unpack_from(info, _HEARD)[0])
    read = max(0, received - unread)
    return Traffic(read, acknowledged + unsent, silent_ms / 1000, _round_trip_s(info))


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


def _ends(connection: socket.socket) -> tuple[Any, ...] | None:
    try:
        return (*connection.getsockname(), *connection.getpeername())
    except OSError:
        return None


def _queue(descriptor: int, which: int) -> int:
    return int(_QUEUE.unpack(fcntl.ioctl(descriptor, which, bytes(_QUEUE.size)))[0])


def _round_trip_s(info: bytes) -> float:
    if len(info) < _WHOLE_TCP_INFO_BYTES:
        return 0.0
    found = int(_MICROSECONDS.unpack_from(info, _SHORTEST_ROUND_TRIP)[0])
    return 0.0 if found == _UNKNOWN else found / 1e6


def _count(info: bytes, offset: int) -> int:
    return int(_COUNT.unpack_from(info, offset)[0])
