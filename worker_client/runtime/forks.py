"""Whether this process is a fork of another one, made by Python; and what such a one does not keep.

Every call asks that, and asking the system for the process's number takes as long as all else that
a call of a small tensor does.

A forked child, such as a DataLoader's worker, cannot use the connections to reducers. But as long
as it has copies of them the system does not end them with its parent, and the other ranks hear of
the parent's death only when heartbeats are missing. So the child closes its copies.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_forks = 0
_left: set[tuple[str, int]] = set()  # addresses of reducers, and "" with the ports of our own
_MAPPED = "::ffff:"  # how IPv6 writes an address of IPv4


def forks() -> int:
    """Return how many forks lie between this process and the one that imported this module."""
    return _forks


def leave_in_child(address: str, port: int) -> None:
    """Have children close their copies of connections to there.

    Args:
        address: IP address; "" for what a port of this process accepts, and that itself.
        port: TCP port.
    """
    _left.add((address, port))


def _begin_child() -> None:
    global _forks  # noqa: PLW0603 (of the process, as forks are)
    _forks += 1
    descriptors = Path("/proc/self/fd")
    if _left and descriptors.is_dir():
        for number in [int(path.name) for path in descriptors.iterdir()]:
            with suppress(OSError):  # no socket, or one that is not connected
                if _is_left(number):
                    os.close(number)


def _is_left(number: int) -> bool:
    known = socket.socket(fileno=number)
    try:
        if known.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        if ("", known.getsockname()[1]) in _left:
            return True
        host, port, *_ = known.getpeername()
        return (host.removeprefix(_MAPPED), port) in _left
    finally:
        known.detach()


os.register_at_fork(after_in_child=_begin_child)
