"""Memory that is used again: fresh memory costs more than filling it, page-locked memory most."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Buffer(Protocol):
    """An array, a tensor or a memoryview."""

    @property
    def nbytes(self) -> int:
        """Its size."""


B = TypeVar("B", bound=Buffer)


class BufferPool(Generic[B]):
    """Buffers by their size in bytes, whatever element type they hold. Any thread may use it.

    Args:
        allocate: makes a buffer of at least so many bytes.
        most: idle buffers that are kept; those idle for longest go first.
        turns: an idle buffer is dropped when more turns than this have passed since it was given
            back; each `take` and each `skip` is a turn.
        larger: lend out the smallest idle buffer that is large enough; otherwise the size must be
            equal.
    """

    def __init__(
        self,
        allocate: Callable[[int], B],
        *,
        most: int = sys.maxsize,
        turns: int = sys.maxsize,
        larger: bool = False,
    ) -> None:
        self._allocate = allocate
        self._most = most
        self._turns = turns
        self._larger = larger
        self._turn = 0
        # By id; each change is one operation of the dictionary. Not a lock: a signal handler may
        # interrupt its holder, and wait for a thread that gives a buffer back.
        self._idle: dict[int, tuple[int, B]] = {}  # since which turn; the latest comes last
        self._sizes: dict[int, list[int]] = {}  # the ids, by size; some are gone from above
        self._used: dict[int, int] = {}  # sizes of buffers that are lent out

    @property
    def used_bytes(self) -> int:
        """Size of the buffers that are lent out."""
        return sum(list(self._used.values()))

    @property
    def idle_bytes(self) -> int:
        """Size of the buffers that wait to be lent out again."""
        return sum(buffer.nbytes for _, buffer in list(self._idle.values()))

    def take(self, nbytes: int) -> B:
        """Lend out a buffer: of those that fit best, the one that was given back last.

        Raises whatever `allocate` raises.
        """
        self._turn += 1
        buffer = self._find(nbytes)
        self._drop()
        if buffer is None:
            buffer = self._allocate(nbytes)
        self._used[id(buffer)] = buffer.nbytes
        return buffer

    def skip(self) -> None:
        """Count a turn in which no buffer is needed."""
        self._turn += 1

    def give_back(self, buffer: B) -> None:
        """Take back a buffer that nothing reads or writes any more."""
        self.forget(buffer)
        self._idle[id(buffer)] = self._turn, buffer
        self._sizes.setdefault(buffer.nbytes, []).append(id(buffer))
        self._drop()

    def forget(self, buffer: B) -> None:
        """Do without a buffer that something may still read or write."""
        self._used.pop(id(buffer), None)

    def _find(self, nbytes: int) -> B | None:
        larger = (size for size in sorted(self._sizes) if size >= nbytes)
        for size in larger if self._larger else [nbytes]:
            keys = self._sizes.get(size, [])
            with suppress(IndexError):  # none is left
                while True:
                    found = self._idle.pop(keys.pop(), None)
                    if found is not None:
                        return found[1]
        return None

    def _drop(self) -> None:
        while (oldest := self._oldest()) is not None:
            key, (since, buffer) = oldest
            if len(self._idle) <= self._most and self._turn - since <= self._turns:
                return
            try:
                self._sizes[buffer.nbytes].remove(key)
            except ValueError:
                return  # another thread is about to take it, or this one below a signal handler
            self._idle.pop(key, None)

    def _oldest(self) -> tuple[int, tuple[int, B]] | None:
        while True:
            with suppress(RuntimeError):  # another thread has changed it just now
                return next(iter(self._idle.items()), None)
