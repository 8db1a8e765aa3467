"""A client's threads, and what a forked child, which has none of them, does not keep either.

Every call asks whether this process is a fork of another one, made by Python; asking the system for
the process's number takes as long as all else that a call of a small tensor does.

A forked child, such as a DataLoader's worker, cannot use the parent's connections. But as long as
it has copies of them the system does not end them with its parent, and the other ranks hear of the
parent's death only when heartbeats are missing. So the child closes its copies of all that is open
at the fork.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

STOP_S = 5.0  # several times what a farewell takes, or a thread to end

forks = 0  # between this process and the one that imported this module
_owners: WeakKeyDictionary[Any, Callable[[Any], Iterable[int]]] = WeakKeyDictionary()


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


def close_in_child(owner: T, descriptors: Callable[[T], Iterable[int]]) -> None:
    """Have a forked child close its copies of what an object has open, as long as that lives.

    Args:
        owner: of connections.
        descriptors: returns those that it has; called with it, in the child.
    """
    _owners[owner] = descriptors


def _begin_child() -> None:
    global forks  # noqa: PLW0603 (of the process)
    forks += 1
    if not _owners:
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    with contextlib.ExitStack() as all_of_them:  # also when one of them raises
        all_of_them.callback(os.close, nothing)
        for owner, its in list(_owners.items()):
            all_of_them.callback(_replace_copies, owner, its, nothing)


def _replace_copies(owner: T, its: Callable[[T], Iterable[int]], nothing: int) -> None:
    # Owners in this process think that the numbers are theirs, and may close them: they stay taken.
    for number in its(owner):
        if number >= 0:  # else the parent was just closing that socket
            os.dup2(nothing, number, inheritable=False)


os.register_at_fork(after_in_child=_begin_child)
