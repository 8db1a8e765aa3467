"""`Work`: the handle of an all-reduce that may still be in progress."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from reducer.errors import ReductionTimeout


class Work:
    """What `Client.all_reduce` returns; its result is the array or tensor that was given.

    Until it is done the buffer must be neither read nor written. After an error the buffer's
    contents are undefined: parts of it may hold the reduction.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()  # what is on the wire cannot be called back

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the all-reduce has ended and return the array or tensor.

        Args:
            timeout: seconds to wait at most; None waits for the end, which the all-reduce's own
                timeout bounds.

        Raises:
            ReductionTimeout: `timeout` has passed; the all-reduce goes on.
            ReductionError: the all-reduce failed; the class and its attributes say why.
        """
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the all-reduce's own error, which is a TimeoutError too
                raise
        raise ReductionTimeout(f"{self._what} is still in progress after {timeout:g} s")

    def done(self) -> bool:
        """Whether the all-reduce has ended, well or badly."""
        return self._future.done()

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a future of the array or tensor. Its callbacks run on the client's thread."""
        return self._future

    def finish(self, result: Any, error: Exception | None) -> None:
        """End it; for the client alone."""
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)
