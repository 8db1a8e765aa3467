"""All-reduces that have begun and not ended, and what is due with them (sans I/O)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_client.protocol.operation import Operation

STRAGGLER_S = 10.0  # then reducers are asked whom an all-reduce waits for; again twice as late
LAST_S = 1.0  # before its deadline they are asked once more, or halfway if that is later
HURRY_S = 3.0  # the same, when a rank is gone: longer than all take to hear that it lives elsewhere


class Pending:
    """The all-reduces in progress, in the order of their sequence numbers.

    Attributes:
        earliest: no deadline is before this time, in seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self.earliest = math.inf
        self._operations: dict[int, Operation] = {}

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
        timeout_s = operation.timeout_s
        operation.begun, operation.ask_at = now, now + STRAGGLER_S
        operation.deadline = deadline = now + timeout_s
        operation.ask_last_at = deadline - (LAST_S if timeout_s > 2 * LAST_S else timeout_s / 2)
        if deadline < self.earliest:  # noqa: PLR1730 (a call less, in every all-reduce)
            self.earliest = deadline

    def end(self, sequence: int) -> Operation:
        """Remove an all-reduce that has ended, and return it."""
        return self._operations.pop(sequence)

    def expect(self, operation: Operation, deadline: float) -> None:
        """Set the time by which it must be done."""
        operation.deadline = deadline
        self.earliest = min(self.earliest, deadline)

    def expired(self, now: float) -> list[Operation]:
        """Return the all-reduces whose deadline has passed, each once for each deadline."""
        if now < self.earliest:
            return []  # as nearly always; so nothing is kept in order
        due = [each for each in self._operations.values() if each.deadline <= now]
        due.sort(key=lambda each: each.deadline)
        for operation in due:
            operation.deadline = math.inf
        self.earliest = min((each.deadline for each in self._operations.values()), default=math.inf)
        return due

    def straggling(self, now: float) -> list[Operation]:
        """Return the all-reduces of which it is time to ask whom they wait for.

        They are the oldest one, from time to time, and each that has little time left.
        """
        found = [each for each in self._operations.values() if each.ask_last_at <= now]
        for operation in found:
            operation.ask_last_at = math.inf
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
