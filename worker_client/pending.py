"""All-reduces that have begun and not ended, and what is due with them (sans I/O)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_client.operation import Operation

STRAGGLER_S = 10.0  # then reducers are asked whom an all-reduce waits for; again twice as late
LAST_S = 1.0  # before its deadline they are asked once more, or halfway if that is later
HURRY_S = 3.0  # the same, when a rank is gone: longer than all take to hear that it lives elsewhere


class Pending:
    """The all-reduces in progress, in the order of their sequence numbers."""

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name what has ended
        self._last_questions: list[tuple[float, int]] = []  # likewise

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, sequence: int) -> Operation:
        return self._operations[sequence]

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._operations

    def get(self, sequence: int) -> Operation | None:
        """Return an all-reduce, None if it is not in progress."""
        return self._operations.get(sequence)

    def all(self) -> list[Operation]:
        """Return all of them."""
        return list(self._operations.values())

    def begin(self, operation: Operation, now: float) -> None:
        """Take note that an all-reduce has begun, in seconds of the caller's clock."""
        self._operations[operation.sequence] = operation
        operation.begun, operation.ask_at = now, now + STRAGGLER_S
        self.expect(operation, now + operation.timeout_s)
        last_s = operation.timeout_s - min(LAST_S, operation.timeout_s / 2)
        heappush(self._last_questions, (now + last_s, operation.sequence))

    def end(self, operation: Operation) -> None:
        """Take note that it has ended."""
        del self._operations[operation.sequence]

    def expect(self, operation: Operation, deadline: float) -> None:
        """Set the time by which it must be done."""
        operation.deadline = deadline
        heappush(self._deadlines, (deadline, operation.sequence))

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, None if nothing is in progress."""
        while self._deadlines and not self._is_due_at(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> Operation | None:
        """Return an all-reduce whose deadline has passed, once for each deadline."""
        if not self._deadlines or now < self._deadlines[0][0]:
            return None  # as nearly always
        due = self.next_deadline()
        if due is None or now < due:
            return None
        return self._operations[heappop(self._deadlines)[1]]

    def straggling(self, now: float) -> list[Operation]:
        """Return the all-reduces of which it is time to ask whom they wait for.

        They are the oldest one, from time to time, and each that has little time left.
        """
        found = []
        while self._last_questions and self._last_questions[0][0] <= now:
            operation = self.get(heappop(self._last_questions)[1])
            if operation is not None:
                found.append(operation)
        oldest = next(iter(self._operations.values()), None)
        if oldest is not None and now >= oldest.ask_at:
            oldest.ask_at += max(oldest.ask_at - oldest.begun, HURRY_S)
            if oldest not in found:
                found.append(oldest)
        return found

    def hurry(self, now: float) -> None:
        """Have it asked soon whom each waits for: it may be for a rank that is gone."""
        for operation in self._operations.values():
            operation.ask_at = min(operation.ask_at, now + HURRY_S)

    def _is_due_at(self, deadline: float, sequence: int) -> bool:
        operation = self._operations.get(sequence)
        return operation is not None and operation.deadline == deadline
