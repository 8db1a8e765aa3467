"""One call that several all-reduces make up, and its one end."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ReductionError
from reducer.wire.constants import PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.protocol.operation import Operation

PIECE_BYTES = 4 << 20  # long on a link beside what an all-reduce costs, short beside a bucket
_MOST = PLACES - 2  # pieces of one call: those of a large tensor are larger
_ALIGNMENT = 64  # of pieces, in bytes: a multiple of every element's size


class Piece(NamedTuple):
    """A part of a call that is all-reduced by itself.

    Attributes:
        operation: over the memory that travels.
        prepare: fills that memory, or waits until it is filled; called right before the operation
            is submitted.
        finish: takes the result out of it; called when the operation has ended well.
    """

    operation: Operation
    prepare: Callable[[], object] | None = None
    finish: Callable[[], object] | None = None


def cut(nbytes: int) -> list[tuple[int, int]]:
    """Return first and last byte (exclusive) of each piece: equal ones, mostly of `PIECE_BYTES`.

    Ranks must cut alike, so nothing but the size may count.
    """
    count = min(_MOST, max(1, -(-nbytes // PIECE_BYTES)))
    step = max(1, -(-nbytes // (count * _ALIGNMENT))) * _ALIGNMENT
    return [(at, min(at + step, nbytes)) for at in range(0, max(1, nbytes), step)]


class SplitCall:
    """Ends when all of its pieces have: until then some of them use the caller's memory.

    Args:
        pieces: at least one, in the order in which all ranks submit them.
        end: called with the error or None when all pieces have ended; after an error, once more
            for each of them that says so again.
        name: the caller's for it.
        release: called before that, with the same: nothing reads or writes what the pieces travel
            in any more. What it raises is an error as well.

    Attributes:
        error: the first one, with the call's name instead of the piece's.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        end: Callable[[Exception | None], object],
        *,
        name: str | None,
        release: Callable[[Exception | None], object] | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._end = end
        self._pieces = {piece.operation: piece for piece in pieces}
        self._name = name
        self._release = release
        self._open = set(self._pieces)
        # Whoever gets the first number from it writes back. Not a lock: a signal handler may come
        # at any instant, and shut the client down.
        self._claims = itertools.count()

    def submit(self, submit: Callable[[Operation], object]) -> None:
        """Submit all pieces in order, each when its memory is filled.

        Raises:
            ReductionError: the first could not be submitted. After that one, the call ends with it.
        """
        stopped: ReductionError | None = None
        for number, piece in enumerate(self._pieces.values(), 1):
            operation = piece.operation
            operation.more = operation.more or number < len(self._pieces)
            operation.ended = partial(self.piece_ended, operation)
            if piece.prepare is not None:
                piece.prepare()
            if stopped is None:
                try:
                    submit(operation)
                except ReductionError as error:
                    if number == 1:
                        raise
                    stopped = error
            if stopped is not None:  # pieces before it are on their way
                operation.end(stopped)

    def piece_ended(self, operation: Operation, error: Exception | None) -> None:
        """Take note that a piece has ended, and end the call if all have."""
        if self.all_ended(operation, error):
            self.finish()

    def all_ended(self, operation: Operation, error: Exception | None) -> bool:
        """Take note that a piece has ended; return whether all have. It may be said twice."""
        piece = self._pieces[operation]
        if error is not None:
            self.fail(error)
        elif self.error is None and piece.finish is not None:
            self.attempt(piece.finish)
        self._open.discard(operation)
        return not self._open

    def finish(self) -> None:
        """End the call, when all pieces have ended; after an error, at every call."""
        first = next(self._claims) == 0
        if self.error is None and not first:
            return  # another thread writes back just now
        if first and self._release is not None:
            self.attempt(partial(self._release, self.error))
        self._end(self.error)

    def attempt(self, step: Callable[[], object]) -> None:
        """Make a step of the call, whose exception is the call's error."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Let the call end with this error, unless it has one already."""
        if self.error is None:
            if isinstance(error, ReductionError):
                error = copy.copy(error)
                error.name = self._name  # the piece's own is in the message
            self.error = error
