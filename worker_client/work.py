"""`Work`: the handle of an all-reduce that may still be in progress."""

from __future__ import annotations

import concurrent.futures
import math
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reducer.errors import ReductionTimeout
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Lead: TypeAlias = Callable[[Callable[[], bool], float], None]
    Ended: TypeAlias = Callable[[Exception | None], object]

STATELESS: tuple[str, ...] = ()  # slots of a class whose subclasses, compiled or not, have them


class _Condition(type(threading.RLock())):  # type: ignore[misc]
    """A future's condition that no exception out of a signal handler leaves locked.

    That of the library takes its lock in a method that is interpreted, and so may be interrupted
    between taking the lock and saying so; then the thread that ends the all-reduce would wait
    for ever.
    """

    def __init__(self) -> None:
        self._told = threading.Condition(self)
        self.notify_all = self._told.notify_all

    def wait(self, timeout: float | None = None) -> bool:
        try:
            return self._told.wait(timeout)
        except BaseException:
            if not self._is_owned():  # `wait` gives the lock up, and was interrupted meanwhile
                self.acquire()
            raise


class _Future(concurrent.futures.Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()


class Work:
    """What `Client.all_reduce` returns; its result is the array or tensor that was given.

    Until it is done the buffer must be neither read nor written. Of a tensor on a device, it is
    done when the result is there, for all of its streams. After an error the buffer's
    contents are undefined: parts of it may hold the reduction.

    A subclass holds the state, as compiled code may.

    Attributes:
        data: what was given.
        write_back: copies the result there, if it was reduced elsewhere.
        error: why it has failed, or a part of it already has; None if it has not.
    """

    __slots__ = STATELESS

    data: Any
    write_back: Callable[[], object] | None
    error: Exception | None
    # Called by a thread that waits, with `done` and until when: it may bring the end nearer.
    _lead: Lead | None
    _ended: bool
    _future: concurrent.futures.Future[Any] | None  # made if somebody asks
    _waiters: tuple[queue.SimpleQueue[None], ...] | None  # who is to be woken at its end
    # Its end and the making of a future exclude each other. One for each: a child may be forked
    # while it is taken.
    _lock: threading.Lock

    def wait(self, timeout: float | str | None = None) -> Any:
        """Wait until the all-reduce has ended and return the array or tensor.

        Args:
            timeout: seconds to wait at most, or text such as ``"5s"``; None and infinity wait for
                the end, which the all-reduce's own timeout bounds.

        Raises:
            ConfigError: `timeout` is negative or no duration; the all-reduce goes on.
            ReductionTimeout: `timeout` has passed; the all-reduce goes on.
            LocalProtocolError: this is a callback, or a signal handler that interrupted another
                wait, which alone could bring the end; or the client was shut down.
            ReductionError: the all-reduce failed; the class and its attributes say why.
        """
        patience_s = math.inf if timeout is None else config.wait_s("timeout", timeout)
        if not self._ended and not self.ends_within(patience_s):
            raise ReductionTimeout(f"{self} is still in progress after {patience_s:g} s")
        if self.error is not None:
            raise self.error
        return self.data

    def ends_within(self, patience_s: float) -> bool:
        """Wait until the all-reduce has ended, well or badly; false: not in so many seconds.

        Raises:
            LocalProtocolError: as `wait`.
        """
        until = time.monotonic() + patience_s
        if self._lead is not None:
            self._lead(self.done, until)
        if not self._ended:
            left_s = max(0.0, until - time.monotonic())
            # More than `TIMEOUT_MAX`, which is centuries, locks refuse.
            self._wait(left_s if left_s < threading.TIMEOUT_MAX else None)
        return self._ended

    def _wait(self, bound_s: float | None) -> None:
        """Wait for the end, which nobody here brings.

        Ctrl-C may come at any instant. Within a future's condition it can leave that locked, and
        then the thread that ends the all-reduce waits for ever: so there is none between the two.
        """
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self._lock:
            self._waiters = (*(self._waiters or ()), waiter)  # first: it may end without the lock
        if not self._ended:
            with suppress(queue.Empty):
                waiter.get(timeout=bound_s)
            if not self._ended:
                with self._lock:
                    self._waiters = tuple(one for one in self._waiters or () if one is not waiter)

    def done(self) -> bool:
        """Whether the all-reduce has ended, well or badly."""
        return self._ended

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that it waits for, as reducers say after 10 s, and before its deadline."""
        raise NotImplementedError

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a future of the array or tensor.

        Its callbacks run on the client's thread, or on one that waits for an all-reduce; there
        Ctrl-C in one of them drops those that follow. Those of a tensor on a device run on a thread
        of its own, whose current stream brought the result. They must not wait for an all-reduce.
        """
        with self._lock:
            if self._future is None:
                future = _Future()
                future.set_running_or_notify_cancel()  # what is on the wire cannot be called back
                self._future = future  # first: what ends meanwhile, without the lock, settles it
            if self._ended and not self._future.done():  # an interrupt may have kept it from that
                self._settle(self._future)
            return self._future

    def written_back(self) -> Exception | None:
        """Write the result back, and return what that raises: the all-reduce's error."""
        if self.write_back is not None and not self._ended:
            try:
                self.write_back()
            except Exception as refused:  # noqa: BLE001 (the array's own; the waiting thread gets it)
                return refused
        return None

    def finish(self, error: Exception | None) -> None:
        """End it, unless it has ended; for the client alone.

        Args:
            error: why the all-reduce failed; None if it did not, and its result is written back.
        """
        with self._lock:
            if not self._ended:
                self.error = error
                self._ended = True
            future = self._future
            waiters = self._waiters
        for waiter in waiters or ():
            waiter.put(None)
        self._waiters = None  # only now: after an interrupt above, it is ended again
        if future is not None and not future.done():
            self._settle(future)

    def _settle(self, future: concurrent.futures.Future[Any]) -> None:
        if self.error is None:
            future.set_result(self.data)
        else:
            future.set_exception(self.error)
