"""Decisions out of bytes: how an input of a fuzzer becomes operations, and what it has found."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from reducer.wire.constants import MAX_ROUNDS_AHEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")

# Values at which something changes: limits of the protocol and of integers, and their neighbours.
EDGES = (
    0,
    1,
    63,
    64,
    1 << 10,
    MAX_ROUNDS_AHEAD - 1,
    MAX_ROUNDS_AHEAD,
    MAX_ROUNDS_AHEAD + 1,
    1 << 20,
    (1 << 22) + 1,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


class ViolationError(AssertionError):
    """A promise is broken: what a fuzzer looks for."""


def check(holds: bool, promise: str) -> None:
    """Raise `ViolationError` with a promise, and what was found instead, unless it holds."""
    if not holds:
        raise ViolationError(promise)


class Source:
    """The bytes of one input, read from front to back; after their end everything is zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Number of bytes that were not read yet."""
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        """Return the next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, end: int) -> int:
        """Return a number from 0 to `end` - 1, `end` being 256 at most."""
        return self.byte() % end

    def pick(self, options: Sequence[_T]) -> _T:
        """Return one of at most 256 options."""
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        """Return True for one byte out of `one_in`; zero, as after the end, gives False."""
        return self.byte() % one_in == 1

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes, fewer at the end of the input."""
        taken = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return taken

    def number(self, bits: int) -> int:
        """Return an unsigned number of so many bits: small, at an edge, or any."""
        kind = self.byte()
        if kind < 128:
            value = kind % 8
        elif kind < 224:
            value = EDGES[kind % len(EDGES)]
        else:
            value = int.from_bytes(self.take(bits // 8), "little")
        return value & ((1 << bits) - 1)
