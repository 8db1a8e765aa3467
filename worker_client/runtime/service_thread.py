"""A client's threads, and what a forked child, which has none of them, does not keep either.

Every call asks whether this process is a fork of another one, made by Python; asking the system for
the process's number takes as long as all else that a call of a small tensor does.

A forked child, such as a DataLoader's worker, cannot use the connections to reducers. But as long
as it has copies of them the system does not end them with its parent, and the other ranks hear of
the parent's death only when heartbeats are missing. So the child closes its copies.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STOP_S = 5.0  # several times what a farewell takes, or a thread to end

forks = 0  # between this process and the one that imported this module
_left: set[tuple[str, int]] = set()  # addresses of reducers, and "" with the ports of our own
_MAPPED = "::ffff:"  # how IPv6 writes an address of IPv4


class ServiceThread(threading.Thread, Generic[T]):
    """A thread of a client, which starts when it is first needed.

    Args:
        name: of the thread.
        run: what it does, once.

    Attributes:
        queue: what the thread is asked for, if it waits for that; signal handlers may put to it.
    """

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._gate = threading.RLock()  # a signal handler may take it again

    def start(self) -> None:
        """Start the thread unless it has started; if Ctrl-C interrupts this, the next call does."""
        with self._gate:
            if self.ident is None:
                super().start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self

    def wait_for_end(self) -> bool:
        """Wait `STOP_S` at most, unless this is it; return whether there is no more to wait for."""
        if self.is_alive() and not self.is_current:
            self.join(STOP_S)
        return self.is_current or not self.is_alive()


def leave_in_child(address: str, port: int) -> None:
    """Have children close their copies of connections to there.

    Args:
        address: IP address; "" for what a port of this process accepts, and that itself.
        port: TCP port.
    """
    _left.add((address.removeprefix(_MAPPED), port))


def _begin_child() -> None:
    global forks  # noqa: PLW0603 (of the process)
    forks += 1
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
