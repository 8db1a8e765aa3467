"""`Handle`: what the asynchronous calls return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from reducer.errors import ConfigError, ReductionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Waitable(Protocol):
    """What a handle may be made of: an all-reduce's `Work`, or another handle."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self) -> Any:
        """Wait until it has ended."""


class Handle:
    """One asynchronous call, which may be made of several all-reduces.

    Args:
        works: the all-reduces; none for what is done already.
        finish: makes the call's result of theirs, once; in the thread that waits first.
    """

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Wait until all is done, and return the call's result: a tensor or a list of tensors.

        Raises:
            ReductionError: an all-reduce failed; the class and its attributes say why.
        """
        if self._finish is not None:
            wait_for_all(self._works)
            self._result = self._finish()
            self._works, self._finish = (), None
        return self._result


def wait_for_all(works: Iterable[Waitable]) -> None:
    """Wait for every one, and only then raise the first one's error, if there is one.

    Raises:
        ReductionError: an all-reduce failed.
    """
    first: ReductionError | None = None
    for work in works:
        try:
            work.wait()
        except ReductionError as error:  # noqa: PERF203 (one by one is the point)
            first = first or error
    if first is not None:
        raise first


def poll(handle: Handle) -> bool:
    """Whether an asynchronous call is done, so that `synchronize` would not wait."""
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call and return its result; in-place ones are complete only then.

    Raises:
        ReductionError: it failed; the class and its attributes say why.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"a handle of an asynchronous call is needed, got {handle!r}")
    return handle
