"""One call of `Client.all_reduce`: the all-reduces that it is made of, and its one end."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker_client.protocol.operation import Operation
    from worker_client.staging.host_buffer import HostBuffer
    from worker_client.work import Work


class Piece(NamedTuple):
    """A part of a call that is all-reduced by itself.

    Attributes:
        operation: over the memory that travels.
        prepare: fills that memory; called right before the operation is submitted.
        finish: takes the result out of it; called when the operation has ended well.
    """

    operation: Operation
    prepare: Callable[[], object] | None = None
    finish: Callable[[], object] | None = None


class Call:
    """Ends when all of its pieces have: until then some of them use the caller's memory.

    Args:
        work: what the caller waits for.
        data: what the caller gave, and gets.
        buffer: its memory; `write_back` is called when all pieces have ended well.
        pieces: at least one, in the order in which all ranks submit them.
        name: the caller's for it.
        release: called when all pieces have ended, however they did: nothing reads or writes what
            they travel in any more.

    Attributes:
        nbytes: size of the caller's buffer.
        error: the first with which a piece has ended.
    """

    def __init__(
        self,
        work: Work,
        data: Any,
        buffer: HostBuffer,
        pieces: Sequence[Piece],
        *,
        name: str | None,
        release: Callable[[], object] | None,
    ) -> None:
        self.nbytes = buffer.view.nbytes
        self.error: Exception | None = None
        self._work = work
        self._data = data
        self._write_back = buffer.write_back
        self._pieces = {piece.operation: piece for piece in pieces}
        self._name = name
        self._release = release
        self._open = set(self._pieces)
        # Whoever gets the first number from it writes back. Not a lock: a signal handler may come
        # at any instant, and shut the client down.
        self._claims = itertools.count()

    def prepared(self) -> Iterator[Operation]:
        """Give the operations in order, each when its memory is filled."""
        for piece in self._pieces.values():
            if piece.prepare is not None:
                piece.prepare()
            yield piece.operation

    def ended(self, operation: Operation, error: Exception | None) -> bool:
        """Take note that a piece has ended; return whether all have. It may be said twice."""
        piece = self._pieces[operation]
        if error is not None:
            self._fail(error)
        elif self.error is None and piece.finish is not None:
            piece.finish()
        self._open.discard(operation)
        return not self._open

    def finish(self) -> None:
        """End the caller's work, when all pieces have ended; after an error, at every call."""
        first = next(self._claims) == 0
        if self.error is None and not first:
            return  # another thread writes back just now
        if first and self._release is not None:
            self._release()
        try:
            if self.error is None and self._write_back is not None:
                self._write_back()
        except Exception as refused:  # noqa: BLE001 (whoever waits gets it)
            self.error = refused
        self._work.finish(self._data, self.error)

    def end(self, operation: Operation, error: Exception | None) -> None:
        """Take note that a piece has ended, and end the call if all have."""
        if self.ended(operation, error):
            self.finish()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that it waits for, as far as a reducer was asked."""
        return next((piece.missing for piece in list(self._open) if piece.missing), ())

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            if isinstance(error, ReductionError) and error.name != self._name:  # a piece's own
                error = copy.copy(error)
                error.name = self._name
            self.error = error
