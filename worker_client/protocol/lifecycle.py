"""The life of an all-reduce in a session: its end, whom it waits for, who is told (sans I/O).

When no reducer is left, others bring calls to their end, with what each rank has of them.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from reducer.errors import (
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import MAX_ROUNDS_AHEAD, PLACES, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import encode_error
from worker_client.protocol.flight import Send
from worker_client.protocol.link import Failed
from worker_client.protocol.operation import STRAGGLER_S, Names, Pending, Unfinished
from worker_client.protocol.phase import Occurrence

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reducer.errors import ReductionError
    from worker_client.protocol import _flight
    from worker_client.protocol.context import Context
    from worker_client.protocol.flight import Action
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation

FIRST_PLACE = 1  # of an all-reduce in its call; place 0 is for the ranks' own question
GRACE_S = 0.15  # after a deadline: for a reducer to say who is missing, if none has said so yet
_MOST_FAILED = 256  # entries of what has failed here; then the oldest become one

log = logging.getLogger(__name__)


class Numbering:
    """Has the flight give all-reduces their numbers, and knows why the latest call has failed.

    Args:
        flight: gives the numbers, which are the same at every rank.
    """

    def __init__(self, flight: _flight.CompiledFlight) -> None:
        self._flight = flight
        self._failed: tuple[int, ReductionError] | None = None  # the number of a call, and why

    @property
    def end(self) -> int:
        """Number above those of all that were asked for."""
        return self._flight.end_of_numbers

    def give(self, operation: Operation) -> None:
        """Give what is asked for next its number; after a failure in its call, the reason, too."""
        self._flight.number(operation)
        if self._failed is not None and self._failed[0] == operation.sequence // PLACES:
            operation.refusal = operation.refusal or self._failed[1]
        if operation.refusal is not None:  # now: it may be held, and others are numbered meanwhile
            self._flight.forget_history(operation)

    def forget(self, operation: Operation, error: ReductionError) -> None:
        """Compare later calls by what follows them: other ranks may know less of a failure."""
        number = operation.sequence // PLACES
        if number == (self.end - 1) // PLACES:  # more of its call may be asked for
            self._failed = number, error
        self._flight.forget_history(operation)


class Calls:
    """All-reduces in progress: the callers', and at times the ranks' own question.

    Args:
        context: the session's.
        ended: called with each that has ended, and its error or None.

    Attributes:
        active: those that have begun and not ended.
        names: what the ranks call them.
        numbering: gives them their numbers.
        aborts: tells reducers of a bad end.
        final: why nothing is begun any more, if the ranks that are left go on elsewhere.
        agreement: the one by which the ranks are agreeing, if they are.
    """

    def __init__(
        self,
        context: Context,
        ended: Callable[[Operation, ReductionError | None], list[Action]],
    ) -> None:
        self.active = Pending(context.flight)
        self.names = Names()
        self.numbering = Numbering(context.flight)
        self.aborts = Aborts(context)
        self.final: RankLostError | None = None
        self.agreement: Operation | None = None
        self._context = context
        self._flight = context.flight
        self._ended = ended
        self._asked: deque[int] = deque()  # numbers of what may have to be handed over
        self._paused_s = 0.0  # the latest pause that ended a connection,
        self._results_before = 0  # and how many results had come until then

    def expire(self, now: float) -> list[Action]:
        """End what is not done by its deadline, when reducers have had time to say why."""
        actions: list[Action] = []
        while due := self.active.expired(now):  # an end may begin what was due already
            for operation in due:
                if operation.sequence in self.active:  # others of its call end with the first
                    actions += self._expire(operation, now)
        return actions

    def _expire(self, operation: Operation, now: float) -> list[Action]:
        missing = ", ".join(map(str, operation.missing))
        error = ReductionTimeout(
            f"{operation}: not done after {operation.timeout_s:g} s "
            f"at rank {self._context.spec.rank}{missing and f', waiting for rank {missing}'}",
            missing=operation.missing,
            sequence=operation.sequence,
        )
        waiting = self.waiting(operation.sequence)
        if operation.overdue or not waiting:
            return self.fail(operation, error)
        operation.overdue = True
        self.active.expect(operation, now + GRACE_S)
        failed = Failed(operation.sequence, operation.sequence, error)
        return [self.aborts.abort(link, failed) for link in waiting]

    def fail(
        self, operation: Operation, error: ReductionError, told_by: Link | None = None
    ) -> list[Action]:
        """End an all-reduce badly, and tell the other reducers that it cannot be finished."""
        context = self._context
        if context.spec.elastic and self.final is None and isinstance(error, RankLostError):
            # What another rank has finished, and this one will get from it, it is to keep.
            self.final = error
            context.occur(Occurrence.RANK_LOST)
            context.freeze()
            return self.fail_all(error)
        if self._paused_s and isinstance(error, (RankLostError, ReducerLostError)):
            error = self._explain(error)
        actions = self.drop(operation, error)
        actions += self.aborts.announce(operation.sequence, error, told_by)
        return actions + self._fail_others(operation, error)

    def note_pause(self, seconds: float) -> None:
        """Record that a reducer ended its connection as this process did not run for so long.

        Until a result comes, that is why anything is lost.
        """
        self._paused_s, self._results_before = seconds, self._results()

    def _explain(self, error: ReductionError) -> ReductionError:
        """Say that it was this rank that the others lost, whatever came of it here."""
        if self._results() != self._results_before:
            self._paused_s = 0.0  # the reducers have served this rank since
            return error
        rank = self._context.spec.rank
        return RankLostError(
            f"rank {rank}, this process, did not run for {self._paused_s:.1f} s, and the others "
            "lost it: set REDUCTION_PATIENCE to more than that, so that they wait for it",
            rank=rank,
        )

    def _results(self) -> int:
        return sum(self._flight.stats(link.index).results for link in self._context.links)

    def refuse(self, operation: Operation, error: ReductionError) -> list[Action]:
        """End an all-reduce that cannot begin at this rank, and tell the reducers why."""
        self.numbering.forget(operation, error)
        actions: list[Action] = [*self.aborts.announce(operation.sequence, error)]
        actions += self._ended(operation, error)
        return actions + self._fail_others(operation, error)

    def _fail_others(self, operation: Operation, error: ReductionError) -> list[Action]:
        """End badly what else is in progress of a call of which one all-reduce has failed."""
        actions: list[Action] = []
        for other in self._others(operation):
            actions += self.drop(other, error)
            actions += self.aborts.announce(other.sequence, error)
        return actions

    def _others(self, operation: Operation) -> list[Operation]:
        if operation.call is None:
            return []
        return [other for other in self.active.all() if other.call is operation.call]

    def fail_all(self, error: ReductionError) -> list[Action]:
        """End everything badly."""
        actions: list[Action] = []
        for operation in self.active.all():
            if operation.sequence in self.active:  # others of its call end with the first
                actions += self.fail(operation, error)
        return actions

    def drop(self, operation: Operation, error: ReductionError) -> list[Action]:
        """End an all-reduce badly here, and tell nobody."""
        self.leave(operation)
        self.numbering.forget(operation, error)
        return self._ended(operation, error)

    def leave(self, operation: Operation) -> None:
        """Do nothing more for an all-reduce, whose end is another's business."""
        self._flight.end(operation.sequence)

    def waiting(self, sequence: int) -> list[Link]:
        """Return the links on which results of an all-reduce are expected."""
        return [one for one in self._context.links if self._flight.waits_for(one.index, sequence)]

    def may_be_handed_over(self, sequence: int) -> None:
        """Record what is asked for, and forget what is finished at every rank."""
        self._asked.append(sequence)
        while self._asked[0] < self._flight.reached:
            self._asked.popleft()

    def hand_over(self, held: Iterable[Operation]) -> list[Unfinished]:
        """Leave all calls to others, `held` ones too; return what some rank may not have finished.

        The ranks' own questions are nobody's calls, and nobody asks them any more.
        """
        waiting = {operation.sequence: operation for operation in held}
        results = self._results_kept()
        calls = []
        for sequence in self._asked:
            if sequence < self._flight.reached:
                continue
            operation = waiting.get(sequence) or self.active.get(sequence)
            known = results.get(sequence, {})
            failed = operation is None and not known
            done = operation is None and not failed
            chunks = [(offset, offset + len(result)) for offset, result in known.items()]
            calls.append(Unfinished(sequence, done, failed, chunks, operation, known))
        self._context.freeze()
        for operation in self.active.all():
            self.leave(operation)
        self._flight.confirm(self.numbering.end)  # what was kept is copied
        return calls

    def _results_kept(self) -> dict[int, dict[int, bytes]]:
        """Return copies of the results that are kept, by sequence number and offset."""
        found: dict[int, dict[int, bytes]] = {}
        for link in self._context.links:
            for chunk in self._flight.carried(link.index):
                kept = self._flight.retained(chunk.sequence, chunk.offset) if chunk.done else None
                if kept is not None:
                    offset = Header.unpack(kept[0]).offset
                    found.setdefault(chunk.sequence, {})[offset] = bytes(kept[1])
        return found


class Aborts:
    """What reducers are told, all of them: any may take the place of others later."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._flight = context.flight
        self._failed: deque[Failed] = deque()  # what some rank may not have finished

    def announce(
        self, sequence: int, error: ReductionError, told_by: Link | None = None
    ) -> list[Send]:
        """Tell all reducers but the one that has told us that an all-reduce cannot be finished."""
        return self._note(Failed(sequence, sequence, error), told_by)

    def announce_finished(self, error: ReductionError) -> list[Send]:
        """Tell that nobody can have results from here that other ranks may still lack."""
        reached, watermark = self._flight.reached, self._flight.watermark
        if reached == watermark:
            return []
        self._failed.clear()  # it is all among this
        return self._note(Failed(reached, watermark - 1, error))

    def _note(self, failed: Failed, told_by: Link | None = None) -> list[Send]:
        while self._failed and self._failed[0].last < self._flight.reached:
            self._failed.popleft()
        if len(self._failed) == _MOST_FAILED:
            oldest, next_one = self._failed.popleft(), self._failed.popleft()
            last = max(oldest.last, next_one.last)
            self._failed.appendleft(Failed(min(oldest.first, next_one.first), last, oldest.error))
        self._failed.append(failed)
        sends = []
        for link in self._context.members:
            if link is not told_by:
                link.untold.append(failed)
                sends += self.pay(link)
        return sends

    def welcomed(self, link: Link) -> None:
        """Record that a reducer is to be told everything: it may be another process now."""
        link.untold = list(self._failed)

    def pay(self, link: Link) -> list[Send]:
        """Tell a reducer what has failed here and it was not told yet, as far as that may be."""
        sends = []
        limit = self._flight.watermark + MAX_ROUNDS_AHEAD  # nothing may be said of what is beyond
        while link.untold and link.member and link.untold[0].last < limit:
            sends.append(self.abort(link, link.untold.pop(0)))
        return sends

    def abort(self, link: Link, failed: Failed) -> Send:
        """Tell a reducer of all-reduces that this rank gives up."""
        header = self._context.header(
            MessageType.ABORT,
            sequence=failed.first,
            nbytes=failed.last - failed.first,
            epoch=self._context.map.epoch,
        )
        return Send(link.index, header.pack(), encode_error(failed.error))


class LostRankTracker:
    """What reducers have said of ranks.

    Args:
        context: the session's.
        active: the all-reduces in progress.
    """

    def __init__(self, context: Context, active: Pending) -> None:
        self._context = context
        self._active = active
        self._outdated: set[int] = set()  # links whose next PING may be from before the agreement
        self._lost: dict[int, tuple[int, ...]] = {}  # by link: ranks, if its reducer said so last

    @property
    def lost(self) -> set[int]:
        """Ranks that a reducer in use has lost, or that have left."""
        # One that cannot reach a rank, but is not in use, says nothing of that rank's life.
        links, uses = self._context.links, self._context.map.uses
        said = tuple(self._lost.items())  # as another thread may ask
        return {rank for link, lost in said if uses(links[link].reducer) for rank in lost}

    def record(self, link: Link, lost: tuple[int, ...], now: float) -> None:
        """Record the ranks that are lost at a reducer, by its latest PING."""
        if link.index in self._outdated:
            self._outdated.discard(link.index)
            return
        news = set(lost) - set(self._lost.pop(link.index, ()))
        if lost:
            self._lost[link.index] = lost
        if news:
            self._active.hurry(now)

    def agreed(self) -> None:
        """Forget who was lost: every rank has just said which reducers it can use."""
        self._lost.clear()
        self._outdated = {link.index for link in self._context.links}

    def begin(self, now: float) -> None:
        """See to it that it is soon asked whom an all-reduce waits for, if ranks are lost."""
        if self._lost:
            self._active.hurry(now)

    def answer(
        self, operation: Operation, link: Link, missing: Collection[int], now: float
    ) -> RankLostError | None:
        """Say whom an all-reduce waits for; return why it waits in vain, if it does."""
        # One that is missing may have gone on elsewhere without another one, which is lost.
        gone = self.lost if self._context.spec.elastic else self.lost.intersection(missing)
        if lost := sorted(gone):
            # This reducer cannot know: it was restarted, and that rank has never been there.
            why = f"rank {lost[0]}, which reducer {link.address} waits for, has left or was lost"
            return RankLostError(why, rank=lost[0])
        operation.missing = tuple(missing)
        waited = now - operation.begun
        if waited >= STRAGGLER_S and not operation.unwatched:
            log.warning(
                "%s: reducer %s waits for rank %s, %.0f s so far",
                operation,
                link.address,
                ", ".join(map(str, missing)),
                waited,
            )
        return None


def merge(
    everywhere: Sequence[Sequence[Unfinished]],
) -> tuple[int, dict[int, list[Unfinished]]]:
    """Find out what ranks have of the calls that any of them has begun; each tells of one at least.

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
    """Return the parts of a buffer of `nbytes` without those that are known: ends by beginnings."""
    parts = sorted(known.items())
    ends = [0, *(high for _, high in parts)]
    begins = [*(low for low, _ in parts), nbytes]
    return [(low, high) for low, high in zip(ends, begins, strict=True) if low < high]
