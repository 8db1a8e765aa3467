"""The first all-reduces of a new membership: its ranks find out what they have of earlier calls."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.errors import ReductionError
    from worker_client.communicators.replay_log import ReplayEntry, ReplayLog
    from worker_client.protocol.spec import JobSpec


class NewLossError(Exception):
    """One of those that are to reconcile is lost as well."""


class Reconciliation:
    """Brings calls to the same end at all ranks of a new membership, that of `spec`.

    `ask` makes an all-reduce in it and waits for its end. Calls that have failed at a rank for
    another reason end with `cause`.
    """

    def __init__(
        self, spec: JobSpec, ask: Callable[[Operation], None], cause: ReductionError
    ) -> None:
        self.ends: list[ReplayEntry] = []  # calls that have ended in it
        self.last = -1  # sequence number of its last all-reduce
        self._me, self._ranks = spec.rank, spec.world_size
        self._ask = ask
        self._cause = cause

    def run(self, replay_log: ReplayLog, timeout_s: float) -> None:
        """Bring to their end the calls that have ended at any rank; the others can be made again.

        Raises:
            RankLostError, NewLossError: another rank is lost; fewer ranks may reconcile.
            ReductionError: it failed.
        """
        bounds = array("q", [-replay_log.unfinished(), replay_log.ended()])
        self._all_reduce(bounds, ReduceOp.MAX, "which calls are unfinished", timeout_s)
        first, end = -bounds[0], bounds[1]
        replay_log.begin_at(first)
        calls = replay_log.calls(first, end)
        facts = array("q")  # per call: who supplies the result, whether nobody lacks it, or failed
        for entry, lacks in calls:
            has = entry is not None and entry.result is not None
            failed = entry is not None and entry.error is not None
            facts.extend([self._me if has else self._ranks, not lacks, not failed])
        if not calls:
            return
        self._all_reduce(facts, ReduceOp.MIN, "who has their results", timeout_s)
        for at, (entry, _) in enumerate(calls):
            supplier, none_lacks, none_failed = facts[3 * at : 3 * at + 3]
            if none_lacks:
                continue
            if not none_failed:
                failed_here = replay_log.fail(first + at, self._cause)
                self.ends += [] if failed_here is None else [failed_here]
            elif supplier < self._ranks:
                self._supply(_known(entry), supplier, timeout_s)

    def _supply(self, entry: ReplayEntry, supplier: int, timeout_s: float) -> None:
        """Give everyone the result that one rank has: the others add zeros to its bytes."""
        mine = entry.result if supplier == self._me else None
        data = bytearray(entry.operation.nbytes if mine is None else mine)
        agreement = Operation(memoryview(data), DType.UINT8, ReduceOp.SUM, "a result", timeout_s)
        self._ask(agreement)
        self.last = agreement.sequence
        if not entry.over:
            entry.operation.view[: len(data)] = data
            entry.finish(bytes(data), None)
            self.ends.append(entry)

    def _all_reduce(self, data: array[int], op: ReduceOp, name: str, timeout_s: float) -> None:
        view = memoryview(data).cast("B")
        agreement = Operation(view, DType.INT64, op, name, timeout_s)
        self._ask(agreement)
        self.last = agreement.sequence


def _known(entry: ReplayEntry | None) -> ReplayEntry:
    assert entry is not None, "what others have yet to end is kept"
    return entry
