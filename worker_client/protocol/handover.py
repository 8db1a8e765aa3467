"""What a session leaves to others when no reducer is left: its calls, and what is here of each.

The ranks' own questions are nobody's calls, and nobody asks them any more (sans I/O).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reducer.wire.header import Header
from worker_client.protocol.operation import Unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worker_client.protocol.flight import Flight
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation, Pending


class HandingOver:
    """Finds which calls are unfinished."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque()  # numbers of what some rank may not have finished

    def asked(self, sequence: int, reached: int) -> None:
        """Take note of what is asked for.

        Args:
            sequence: its number.
            reached: all below this number is finished at every rank.
        """
        self._asked.append(sequence)
        while self._asked[0] < reached:
            self._asked.popleft()

    def unfinished(
        self,
        flight: Flight,
        links: Sequence[Link],
        active: Pending,
        waiting: Mapping[int, Operation],
    ) -> list[Unfinished]:
        """Return what some rank may not have finished.

        Args:
            flight: what is known of it.
            links: which carried it.
            active: what has begun and not ended here.
            waiting: what has not begun, by number.
        """
        results = _results(flight, links)
        calls = []
        for sequence in self._asked:
            if sequence < flight.reached:
                continue
            operation = waiting.get(sequence) or active.get(sequence)
            known = results.get(sequence, {})
            failed = operation is None and not known
            done = operation is None and not failed
            chunks = [(offset, offset + len(result)) for offset, result in known.items()]
            calls.append(Unfinished(sequence, done, failed, chunks, operation, known))
        return calls


def merge(
    everywhere: Sequence[Sequence[Unfinished]],
) -> tuple[int, dict[int, list[Unfinished]]]:
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
        number: [theirs.get(number, Unfinished(number)) for theirs in known]
        for number in sorted(numbers)
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
