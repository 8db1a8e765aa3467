"""What a session leaves to others when no reducer is left: its calls, and what is here of each.

Sequence numbers count the ranks' own questions, too, which nobody asks any more. So calls are
numbered without them (sans I/O).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.header import Header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from worker_client.flight import Flight
    from worker_client.link import Link
    from worker_client.operation import Operation
    from worker_client.pending import Pending


@dataclass
class Unfinished:
    """One call that some rank may not have finished.

    Attributes:
        number: which call of the job it is, counted from 0.
        operation: what this rank asked for; None if it has ended here.
        failed: it has ended badly here.
        results: the chunks whose result is here, by offset; all of them if it has ended well.
    """

    number: int
    operation: Operation | None
    failed: bool = False
    results: dict[int, bytes] = field(default_factory=dict)


class Held(NamedTuple):
    """What one rank has of one call.

    Attributes:
        number: which call.
        done: the rank has finished it, and so has all of it.
        failed: it has ended badly there.
        chunks: first and last byte (exclusive) of each result.
    """

    number: int
    done: bool = False
    failed: bool = False
    chunks: Sequence[Sequence[int]] = ()


class HandingOver:
    """Numbers calls, and finds which of them are unfinished."""

    def __init__(self) -> None:
        self.done = False
        self._calls = 0  # of which something was handed over, or that ended before
        self._questions: list[int] = []  # their sequence numbers, ascending

    def asked(self, sequence: int) -> None:
        """Take note that a sequence number belongs to a question."""
        self._questions.append(sequence)

    def unfinished(
        self, flight: Flight, links: Sequence[Link], active: Pending, end: int
    ) -> list[Unfinished]:
        """Return the calls that have begun and that some rank may not have finished.

        Args:
            flight: what is known of them.
            links: which carried them.
            active: those that have not ended here.
            end: the next sequence number.
        """
        results = _results(flight, links)
        calls = []
        for sequence in range(flight.reached, end):
            place = bisect_left(self._questions, sequence)
            if self._questions[place : place + 1] == [sequence]:
                continue
            operation, known = active.get(sequence), results.get(sequence, {})
            failed = operation is None and not known
            calls.append(Unfinished(sequence - place, operation, failed, known))
        self._calls = end - len(self._questions)
        self.done = True
        return calls

    def later(self, operations: Iterable[Operation]) -> list[Unfinished]:
        """Give calls that have not begun their numbers."""
        calls = [Unfinished(self._calls + at, one) for at, one in enumerate(operations)]
        self._calls += len(calls)
        return calls


def held(call: Unfinished) -> Held:
    """Return what this rank tells the others of a call."""
    done = call.operation is None and not call.failed
    chunks = [(offset, offset + len(result)) for offset, result in call.results.items()]
    return Held(call.number, done, call.failed, chunks)


def merge(everywhere: Sequence[Sequence[Held]]) -> tuple[int, dict[int, list[Held]]]:
    """Find out what ranks have of the calls that any of them has begun.

    Args:
        everywhere: what each rank tells, of one call at least.

    Returns:
        The first call that some rank may not have finished, and for it and those after it what each
        rank has, by the call's number.
    """
    first = max(theirs[0].number for theirs in everywhere)  # all ranks have what is before
    known = [{one.number: one for one in theirs} for theirs in everywhere]
    numbers = {number for theirs in known for number in theirs if number >= first}
    return first, {
        number: [theirs.get(number, Held(number)) for theirs in known] for number in sorted(numbers)
    }


def gaps(known: Mapping[int, int], nbytes: int) -> list[tuple[int, int]]:
    """Return the parts of a buffer that are not known.

    Args:
        known: where the known parts begin, and end.
        nbytes: size of the buffer.
    """
    parts = sorted(known.items())
    ends = [0, *(high for _, high in parts)]
    begins = [*(low for low, _ in parts), nbytes]
    return [(low, high) for low, high in zip(ends, begins, strict=True) if low < high]


def _results(flight: Flight, links: Sequence[Link]) -> dict[int, dict[int, bytes]]:
    """Return copies of the results that are kept, by sequence number and offset."""
    found: dict[int, dict[int, bytes]] = {}
    for link in links:
        for chunk in flight.carried(link.index):
            kept = flight.kept(chunk.sequence, chunk.offset) if chunk.done else None
            if kept is not None:
                offset = Header.unpack(kept[0]).offset
                found.setdefault(chunk.sequence, {})[offset] = bytes(kept[1])
    return found
