"""The calls that some rank may not have finished, with what it takes to make them again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from worker_client.protocol.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.errors import ReductionError
    from worker_client.work import Ended


_NEVER = (1 << 63) - 1  # a call that none comes after


class ReplayEntry:
    """One call."""

    __slots__ = ("admits", "attempt", "contribution", "error", "last", "operation", "result")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.contribution = bytes(operation.view)  # empty when the call has ended
        # The same call as the current membership makes it; None: not yet, or not any more.
        self.attempt: Operation | None = None
        self.result: bytes | None = None
        self.error: ReductionError | None = None
        # The all-reduce of the current membership that every rank must have finished before this
        # call may be forgotten.
        self.last = -1
        self.admits = False  # whether the result says how many ranks join behind it

    @property
    def over(self) -> bool:
        """Whether it has ended here."""
        return self.result is not None or self.error is not None

    @property
    def withdrawn(self) -> bool:
        """Whether it can only be made anew by its caller: a sum of leaves that has not ended."""
        return self.operation.leaves is not None and not self.over

    def begin(self, ended: Ended) -> Operation:
        """Return a fresh attempt, with the contribution in the buffer; `ended` hears of its end."""
        call = self.operation
        if call.refusal is None:
            call.view[:] = self.contribution
        self.attempt = Operation(
            call.view,
            call.dtype,
            call.op,
            call.name,
            call.timeout_s,
            call=call.call,
            refusal=call.refusal,
            ended=ended,
            leaves=call.leaves,
        )
        return self.attempt

    def finish(self, result: bytes | None, error: ReductionError | None) -> None:
        """Record its end, with a result or an error."""
        if self.attempt is not None:
            self.last = self.operation.sequence = self.attempt.sequence
        self.result, self.error = result, error
        self.contribution = b""  # it is not made again


class ReplayLog:
    """Calls in their order, numbered from 0; threads may share it.

    A rank that `joins` a job that runs learns first which number its next call has.

    Attributes:
        next: number of the next call.
        contributors: ranks whose contributions the latest call has that has ended, if it was the
            only one in progress.
    """

    def __init__(self, *, joins: bool = False) -> None:
        self.next = 0
        self.contributors: tuple[int, ...] = ()
        self._joins = joins
        self._entries: dict[int, ReplayEntry] = {}
        self._doomed: dict[int, ReductionError] = {}
        self._lock = threading.Lock()  # of both, and `next`

    def __iter__(self) -> Iterator[ReplayEntry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def add(self, entry: ReplayEntry) -> None:
        """Enter a call that has not begun."""
        with self._lock:
            self._entries[self.next] = entry
            if (doom := self._doomed.pop(self.next, None)) is not None:
                entry.finish(None, doom)
            self.next += 1

    def begin_at(self, number: int) -> None:
        """Give the first call of a rank that joins this number, which is the others' next one."""
        with self._lock:
            if self._joins:
                self.next, self._joins = number, False

    def latest(self) -> ReplayEntry | None:
        """Return the call that was entered last, if some rank may not have finished it."""
        with self._lock:
            return self._entries.get(self.next - 1)

    def fail(self, number: int, error: ReductionError) -> ReplayEntry | None:
        """Have a call fail that has failed at another rank, as soon as it is made here.

        Return it if it was made and had not ended.
        """
        with self._lock:
            entry = self._entries.get(number)
            if entry is None and number >= self.next:
                self._doomed[number] = error
            if entry is None or entry.over:
                return None
            entry.finish(None, error)
            return entry

    def calls(self, first: int, end: int) -> list[tuple[ReplayEntry | None, bool]]:
        """Return calls by their numbers, and whether each is yet to end here.

        One that is finished at every rank, or was not made here yet, is None.
        """
        with self._lock:
            found = [(number, self._entries.get(number)) for number in range(first, end)]
            return [
                (entry, number >= self.next if entry is None else not entry.over)
                for number, entry in found
            ]

    def unfinished(self) -> int:
        """Return the number of the first call that has not ended here."""
        with self._lock:
            if self._joins:
                return _NEVER
            calls = self._entries.items()
            return next((number for number, entry in calls if not entry.over), self.next)

    def ended(self) -> int:
        """Return the number after the last call that has ended here, 0 if there is none."""
        with self._lock:
            calls = self._entries.items()
            return max((number for number, entry in calls if entry.over), default=-1) + 1

    def close(self) -> None:
        """Forget what has ended, though others may lack it: there is no reconciling any more."""
        with self._lock:
            self._entries = {at: entry for at, entry in self._entries.items() if not entry.over}

    def withdraw_leaves(self) -> list[ReplayEntry]:
        """Forget the sums of leaves that have not ended, at all ranks alike; return them.

        They were dealt among other ranks. Later calls move up: no rank makes these any more.
        """
        with self._lock:
            gone = [entry for entry in self._entries.values() if entry.withdrawn]
            first = min(self._entries, default=self.next)
            kept = [entry for entry in self._entries.values() if not entry.withdrawn]
            self._entries = dict(enumerate(kept, first))
            self._doomed = {at - len(gone): doom for at, doom in self._doomed.items()}
            self.next -= len(gone)
            return gone

    def prune(self, reached: float) -> None:
        """Forget what has ended at every rank: all-reduces below `reached` of this membership."""
        with self._lock:
            while self._entries:
                number, entry = next(iter(self._entries.items()))
                if not entry.over or entry.last >= reached:
                    return
                del self._entries[number]
