"""The first all-reduces of a new membership: its ranks find out what they have of earlier calls."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from reducer.errors import RankLostError
from reducer.wire.constants import DType, ReduceOp
from worker_client.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.journal import Entry, Journal
    from worker_client.settings import Settings


class NewLossError(Exception):
    """One of those that are to meet is lost as well."""


class Meeting:
    """One meeting.

    Args:
        settings: of the new membership.
        ask: makes an all-reduce in it and waits for its end.

    Attributes:
        ends: calls that have ended in the meeting.
        last: sequence number of its last all-reduce.
    """

    def __init__(self, settings: Settings, ask: Callable[[Operation], None]) -> None:
        self.ends: list[Entry] = []
        self.last = -1
        self._me, self._ranks = settings.rank, settings.world_size
        self._ask = ask

    def run(self, journal: Journal, timeout_s: float) -> None:
        """Bring to their end the calls that have ended at any rank; the others can be made again.

        Args:
            journal: this rank's calls; those that end here are changed.
            timeout_s: for each question.

        Raises:
            RankLostError, NewLossError: another rank is lost; a smaller meeting may succeed.
            ReductionError: the meeting failed.
        """
        bounds = array("q", [-journal.unfinished(), journal.ended()])
        self._all_reduce(bounds, ReduceOp.MAX, "which calls are unfinished", timeout_s)
        first, end = -bounds[0], bounds[1]
        entries = [journal.get(number) for number in range(first, end)]
        facts = array("q")  # per call: who supplies the result, whether nobody lacks it, or failed
        for entry in entries:
            has = entry is not None and entry.result is not None
            lacks = entry is not None and not entry.over
            failed = entry is not None and entry.error is not None
            facts.extend([self._me if has else self._ranks, not lacks, not failed])
        if not entries:
            return
        self._all_reduce(facts, ReduceOp.MIN, "who has their results", timeout_s)
        for at, entry in enumerate(entries):
            supplier, none_lacks, none_failed = facts[3 * at : 3 * at + 3]
            if none_lacks:
                continue
            if entry is None:
                raise RuntimeError(f"call {first + at} is over here, and others have yet to end it")
            if not none_failed:
                self._fail(entry)
            elif supplier < self._ranks:
                self._supply(entry, supplier, timeout_s)

    def _fail(self, entry: Entry) -> None:
        if not entry.over:
            why = "a rank was lost, and at another one this call failed for another reason"
            entry.finish(None, RankLostError(why, rank=-1))
            self.ends.append(entry)

    def _supply(self, entry: Entry, supplier: int, timeout_s: float) -> None:
        """Give everyone the result that one rank has: the others add zeros to its bytes."""
        mine = entry.result if supplier == self._me else None
        data = bytearray(len(entry.contribution) if mine is None else mine)
        question = Operation(memoryview(data), DType.UINT8, ReduceOp.SUM, "a result", timeout_s)
        self._ask(question)
        self.last = question.sequence
        if not entry.over:
            entry.operation.view[:] = data
            entry.finish(bytes(data), None)
            self.ends.append(entry)

    def _all_reduce(self, data: array[int], op: ReduceOp, name: str, timeout_s: float) -> None:
        view = memoryview(data).cast("B")
        question = Operation(view, DType.INT64, op, name, timeout_s)
        self._ask(question)
        self.last = question.sequence
