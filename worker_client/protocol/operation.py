"""All-reduces: what is asked for, what is in progress, and the words of errors (sans I/O).

What is asked for is its caller's handle as well; nothing in this room waits for it.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reducer.errors import MismatchError, ReductionError
from reducer.wire.constants import PLACES, DType, ReduceOp
from worker_client.protocol import _flight
from worker_client.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


STRAGGLER_S, LAST_S = _flight.STRAGGLER_S, _flight.LAST_S  # `flight.h` says what they are
HURRY_S = (
    3.0  # as STRAGGLER_S, when a rank is gone: longer than all take to hear that it lives elsewhere
)
_KEPT_NAMES = 4096


class Operation(_flight.OperationState, Work):
    """What is asked for, and the handle of its caller; how far it is, the flight knows.

    Args:
        view: the buffer's bytes, writable; the result replaces them chunk by chunk. With leaves
            those of this rank's subtrees, one buffer after another; the result replaces the first.
        dtype: element type of the buffer.
        op: reduction.
        name: the caller's name for it, compared between ranks; None for none.
        timeout_s: seconds from submission to the deadline.
        call: identity that all operations of a call share, which get consecutive numbers; None
            for a call of this operation alone.
        refusal: why it cannot be done at this rank: it uses its number up, and the others hear why.
        more: whether another one of its call follows.
        rounded: whether it is to be rounded to travel.
        residual: memory like `view`, where what that takes away is kept and added the next time;
            None for none.
        data, write_back: as of `Work`.
        lead: called by a thread that waits, with `done` and until when: it may bring the end
            nearer. None if others bring it.
        leaves: what this rank has of a step's leaves, if it is their sum; None else.
        ended: called with its error or None before waiting threads are told, when nothing reads or
            writes `view` any more; once more after an interrupt. None when it is over.

    Attributes:
        over: whether its caller has been told of its end.
        nbytes: size of the result.
        cuts_apart: whether its chunks are smaller than others', as each has several subtrees.
        sequence: its number within the job, given at submission.
        since, history: a checksum of what was asked for before, and the call that it begins with.
        deadline: absolute time by which it must be done, in seconds of the session's clock.
        begun: when it was submitted, by the same clock.
        sent, answered: of one that has ended well at the reducers, by the same clock: when the
            latest chunk was sent before the first result came, and when that came; 0 else.
        ask_at: when to ask who is missing, by the same clock.
        ask_last_at: when to ask that for the last time, shortly before the deadline.
        overdue: whether its deadline has passed and the reducers were asked who is missing.
        pieces: all-reduces that it is made of, if it is, and that have not ended.
        cut: whether it is one of as many pieces as a call may have, so that none is cut again.
        fill: fills `view`, or waits until it is filled; called before a piece begins.
        unwatched: whether others may take their time, so that no warning says whom it waits for.
    """

    __slots__ = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that it waits for, as far as a reducer was asked."""
        return self._missing or next((one.missing for one in list(self.pieces) if one.missing), ())

    @missing.setter
    def missing(self, ranks: tuple[int, ...]) -> None:
        self._missing = ranks

    def end(self, error: Exception | None) -> None:
        """Tell the caller that it has ended, once, with an error that names it."""
        if self.over:
            return
        if isinstance(error, ReductionError):
            error = own(error, self)
        elif error is None and self.write_back is not None:
            error = self.written_back()
        ended = self.ended
        if ended is not None:
            ended(error)
        self.finish(error)
        self.over = True  # only now: after an interrupt above, the driver ends this operation again
        # They refer to this operation and to the buffer: so all are freed at once.
        self.ended = self.write_back = None

    def split(
        self,
        pieces: Iterable[Operation],
        release: Callable[[Exception | None], object] | None = None,
    ) -> None:
        """Let it be made of pieces: it ends when all have, with the first error.

        Until then some of them use the caller's memory. Each is to tell `piece_ended` of its end.

        Args:
            pieces: at least one.
            release: called once before it ends, with its error or None: nothing reads or writes
                what the pieces travel in any more. What it raises is an error as well.
        """
        self.pieces = dict.fromkeys(pieces)
        self._release = release
        # The thread that gets its first number writes back. It is no lock, as a signal handler may
        # run at any instant, and shut the client down.
        self._claims = itertools.count()

    def piece_ended(self, piece: Operation, error: Exception | None) -> None:
        """Record that a piece has ended, and end if all have. It may be said twice."""
        if not self._ended:  # else it is said again, after an interrupt
            self.error = self.error or error
            self.sequence = max(self.sequence, piece.sequence)
        self.pieces.pop(piece, None)
        if self.pieces:
            return
        first = next(self._claims) == 0
        if self.error is None and not first:
            return  # another thread writes back just now
        if first:
            release, self._release = self._release, None  # a handle may be kept for long
            try:
                if release is not None:
                    release(self.error)
            except Exception as refused:  # noqa: BLE001 (its waiter gets it)
                self.error = self.error or refused
        self.end(self.error)

    def __str__(self) -> str:
        """Say which all-reduce this is, for errors and logs."""
        name = f" {self.name!r}" if self.name else ""
        number = "" if self.sequence < 0 else f" {self.sequence // PLACES}"
        return f"all-reduce{number}{name} ({self.nbytes} bytes of {self.dtype.name})"


@dataclass
class Unfinished:
    """One all-reduce that some rank may not have finished, as one rank knows it.

    Attributes:
        number: its sequence number.
        done: that rank has finished it, and so has all of it.
        failed: it has ended badly there.
        chunks: first and last byte (exclusive) of each result that is there.
        operation: what this rank asked for; None if it has ended here, and for another rank.
        results: the bytes of `chunks`, by offset, if they are here.
    """

    number: int
    done: bool = False
    failed: bool = False
    chunks: Sequence[Sequence[int]] = ()
    operation: Operation | None = None
    results: dict[int, bytes] = field(default_factory=dict)

    @property
    def told(self) -> tuple[Any, ...]:
        """What other ranks are told of it: the first fields, from which they make their own."""
        return self.number, self.done, self.failed, self.chunks


class Pending:
    """The all-reduces in progress, in the order of their sequence numbers.

    Args:
        flight: has them, and knows the earliest of their deadlines.
    """

    def __init__(self, flight: _flight.CompiledFlight) -> None:
        self._flight = flight

    def __len__(self) -> int:
        return self._flight.active

    def __getitem__(self, sequence: int) -> Operation:
        if (operation := self._flight.find(sequence)) is None:
            raise KeyError(sequence)
        return operation

    def __contains__(self, sequence: int) -> bool:
        return self._flight.find(sequence) is not None

    def get(self, sequence: int) -> Operation | None:
        """Return an all-reduce, None if it is not in progress."""
        return self._flight.find(sequence)

    def all(self) -> list[Operation]:
        """Return all of them."""
        return self._flight.all()

    def expect(self, operation: Operation, deadline: float) -> None:
        """Set the time by which it must be done."""
        operation.deadline = deadline
        self._flight.earliest = min(self._flight.earliest, deadline)

    def expired(self, now: float) -> list[Operation]:
        """Return the all-reduces whose deadline has passed, each once for each deadline."""
        if now < self._flight.earliest:
            return []  # as nearly always; so nothing is kept in order
        everything = self.all()
        due = [each for each in everything if each.deadline <= now]
        due.sort(key=lambda each: each.deadline)
        for operation in due:
            operation.deadline = math.inf
        self._flight.earliest = min((each.deadline for each in everything), default=math.inf)
        return due

    def straggling(self, now: float) -> list[Operation]:
        """Return the all-reduces of which it is time to ask whom they wait for.

        They are the oldest one, from time to time, and each that has little time left.
        """
        everything = self.all()
        found = [each for each in everything if each.ask_last_at <= now]
        for operation in found:
            operation.ask_last_at = math.inf
        oldest = next(iter(everything), None)
        if oldest is not None and now >= oldest.ask_at:
            oldest.ask_at += max(oldest.ask_at - oldest.begun, HURRY_S)
            if oldest not in found:
                found.append(oldest)
        return found

    def hurry(self, now: float) -> None:
        """Have it asked soon whom each waits for: it may be for a rank that is gone."""
        for operation in self.all():
            operation.ask_at = min(operation.ask_at, now + HURRY_S)


class Names:
    """Names of the latest all-reduces, by the tags that reducers see in their place."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by tag as errors print it

    def remember(self, operation: Operation) -> None:
        """Keep the name of an all-reduce that has one."""
        self._names[f"#{operation.tag:016x}"] = str(operation.name)
        if len(self._names) > _KEPT_NAMES:
            del self._names[next(iter(self._names))]

    def restore(self, error: ReductionError) -> ReductionError:
        """Return an error with the caller's names in place of tags."""
        if not isinstance(error, MismatchError) or error.field != "name":
            return error
        expected = self._names.get(str(error.expected), error.expected)
        got = self._names.get(str(error.got), error.got)
        return MismatchError(
            f"all-reduce {(error.sequence or 0) // PLACES}: ranks call it by different names, so "
            f"their order differs: rank {error.rank} says {expected!r}, "
            f"rank {error.other_rank} says {got!r}",
            field=error.field,
            rank=error.rank,
            other_rank=error.other_rank,
            expected=expected,
            got=got,
            sequence=error.sequence,
        )


def refusing(call: _flight.Call | None, why: ReductionError, timeout_s: float) -> Operation:
    """Return what uses up the number of a call that this rank cannot make, of no bytes."""
    nothing = memoryview(b"")
    return Operation(nothing, DType.UINT8, ReduceOp.SUM, None, timeout_s, call=call, refusal=why)


def refused(rank: int, why: object) -> MismatchError:
    """Return what other ranks hear of a call that one rank cannot make."""
    return MismatchError(
        f"rank {rank} takes no part in this call: {why}",
        field="call",
        rank=rank,
        other_rank=rank,
        expected="the same call at every rank",
        got=str(why),
    )


def reason(refusal: ReductionError | None) -> str:
    """Return why a rank cannot make a call, as `refused` was told; "" if it can."""
    if isinstance(refusal, MismatchError) and refusal.field == "call":
        return str(refusal.got)
    return "" if refusal is None else str(refusal)


def own(error: ReductionError, operation: Operation) -> ReductionError:
    """Return an error of this all-reduce alone, which names it."""
    error = copy.copy(error)
    error.name = operation.name
    error.sequence = None if operation.sequence < 0 else operation.sequence // PLACES
    return error
