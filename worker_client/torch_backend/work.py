"""torch.distributed's handle of collectives that reducers do."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch._C._distributed_c10d import Work as TorchWork  # what torch.distributed.Work is

from reducer.errors import ReductionTimeout

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Sequence
    from typing import Any

    from worker_client.work import Work

_NO_TIMEOUT = timedelta(0)  # torch's own value for it

T = TypeVar("T")


def untraced(kind: type[T]) -> type[T]:
    """Let dynamo run the methods of a class as they are.

    DDP's C++ code calls them while `torch.compile` watches this thread. Dynamo would trace each as
    if the script had called it, and cannot: a process group is opaque to it.
    """
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and name != "__init__":
            setattr(kind, name, torch.compiler.disable(method))  # type: ignore[no-untyped-call]
    return kind


@untraced
class ReductionWork(TorchWork):
    """What collectives of the backend return.

    Args:
        parts: the all-reduces that it consists of; none for what is done already.
        results: the tensors that hold the result at the end.
        finish: puts the result into them, when all parts have ended well; perhaps on the client's
            thread. Once, and once more if an exception out of a signal handler comes in between.
        begin: called on the thread that calls the future's callbacks, before them.
    """

    def __init__(
        self,
        parts: Sequence[Work],
        results: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        *,
        begin: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._results = results
        self._finish = finish
        self._begin = begin
        self._missing = {*range(len(parts))}  # parts that have not told the future of their end
        self._unasked = [*enumerate(parts)]  # parts that have not been asked to
        self._asked = False  # all have been
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._called_back = threading.Event()  # set when the callbacks that it had have returned
        self._calling = 0  # the thread that calls them
        self._lock = threading.RLock()  # a part that has ended calls back at once

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the results can be read, and callbacks of the future have returned.

        Args:
            timeout: how long to wait at most; zero waits for the end, which the group's timeout
                bounds.

        Returns:
            True.

        Raises:
            ReductionTimeout: `timeout` has passed; the collective goes on.
            ReductionError: it failed; the class and its attributes say why.
        """
        limit = timeout.total_seconds()
        until = time.monotonic() + limit if limit > 0 else math.inf
        for part in self._parts:
            part.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        self._settle()
        if self._has_callbacks:
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            if not self._called_back.wait(left):
                raise ReductionTimeout(
                    f"a callback of a collective's future has not returned in {limit:g} s"
                )
        return True

    def synchronize(self) -> None:
        """Wait, as a collective of CPU tensors has no stream to be ordered on."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, callbacks too; if it ended well, the results can be read."""
        if not all(part.done() for part in self._parts) or self._has_callbacks:
            return False
        if self._error() is None:
            self._settle()
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error() is None

    def exception(self) -> BaseException | None:
        """Return why it failed, None if it did not or has not ended."""
        return self._error() if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that hold the result."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Refuse: only what was received from any rank has a source."""
        raise RuntimeError("source_rank() is defined for what recv() without a rank returns only")

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors that hold the result.

        Its callbacks run on a thread of their own, unless it is done when they are added, and may
        wait for other collectives, as PowerSGD's hooks do. A failure is a RuntimeError there,
        whose text names the typed error that `wait` raises: the C++ code that reads such futures
        knows no other.
        """
        with self._lock:
            if self._future is None:
                self._future = self._ended.then(lambda _: self._outcome())
            self._ask()
            return self._future

    def _ask(self) -> None:
        """Have the future told of the end; again, if an exception has come in between."""
        with self._lock:
            if self._asked:
                return
            if len(self._unasked) == len(self._parts) and all(part.done() for part in self._parts):
                if not self._ended.done():  # nobody has added a callback
                    self._ended.set_result(None)
                self._called_back.set()
            else:
                while self._unasked:
                    number, part = self._unasked[-1]
                    if part.done():
                        self._on_part(number)
                    else:
                        part.future().add_done_callback(partial(self._on_part, number))
                    self._unasked.pop()
            self._asked = True

    @property
    def _has_callbacks(self) -> bool:
        """Whether callbacks of the future may still run, on another thread than this one."""
        if self._future is None:
            return False
        self._ask()
        return not self._called_back.is_set() and self._calling != threading.get_ident()

    def _on_part(self, number: int, _: concurrent.futures.Future[Any] | None = None) -> None:
        with self._lock:
            self._missing.discard(number)
            last = not self._missing
        if last:
            try:  # the client's thread, where this may be, is needed for what a callback waits for
                threading.Thread(target=self._call_back, name="callbacks").start()
            except RuntimeError:  # Python ends, and starts no more threads
                self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            if self._calling:  # a part has told twice
                return
            self._calling = threading.get_ident()
        try:
            if self._begin is not None:
                self._begin()
            self._ended.set_result(None)
        finally:
            self._called_back.set()

    def _outcome(self) -> list[torch.Tensor]:
        error = self._error()
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        self._settle()
        return self._results

    def _error(self) -> BaseException | None:
        """Return why the first part that failed did; all have ended."""
        errors = (part.future().exception() for part in self._parts)
        return next((error for error in errors if error is not None), None)

    def _settle(self) -> None:
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None  # only now: after an interrupt it is put there again
