"""The life of an all-reduce in a session: its end, whom it waits for, who is told (sans I/O)."""

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
from reducer.wire.messages import encode_error
from worker_client.protocol.flight import Send
from worker_client.protocol.link import Failed
from worker_client.protocol.operation import STRAGGLER_S, Names, Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from reducer.errors import ReductionError
    from reducer.wire.header import Header
    from worker_client.protocol.flight import Action, Flight
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.shard_map import ShardMap
    from worker_client.protocol.spec import JobSpec

FIRST_PLACE = 1  # of an all-reduce in its call; place 0 is for the ranks' own question
GRACE_S = 0.15  # after a deadline: for a reducer to say who is missing, if none has said so yet
_MOST_FAILED = 256  # entries of what has failed here; then the oldest become one

log = logging.getLogger(__name__)


class Numbering:
    """Has the flight give all-reduces their numbers, and knows why the latest call has failed.

    Args:
        flight: gives the numbers, which are the same at every rank.
    """

    def __init__(self, flight: Flight) -> None:
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
        spec: who we are.
        links: the session's.
        flight: what moves them.
        aborts: tells reducers of a bad end.
        ended: called with each that has ended, and its error or None.

    Attributes:
        active: those that have begun and not ended.
        names: what the ranks call them.
        numbering: gives them their numbers.
        final: why nothing is begun any more, if the ranks that are left go on elsewhere.
        question: the one by which the ranks are agreeing, if they are.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: list[Link],
        *,
        flight: Flight,
        aborts: Aborts,
        ended: Callable[[Operation, ReductionError | None], list[Action]],
    ) -> None:
        self.active = Pending(flight)
        self.names = Names()
        self.numbering = Numbering(flight)
        self.question: Operation | None = None
        self._paused_s = 0.0  # the latest pause that ended a connection,
        self._results_before = 0  # and how many results had come until then
        self.final: RankLostError | None = None
        self._spec = spec
        self._frozen: int | None = None
        self._links = links
        self._flight = flight
        self._aborts = aborts
        self._ended = ended

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here, or has failed for good."""
        return self._flight.watermark if self._frozen is None else self._frozen

    def freeze(self) -> None:
        """Let the watermark stay: what ends from now on is not finished, but goes on elsewhere."""
        if self._frozen is None:
            self._frozen = self._flight.watermark

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
            f"at rank {self._spec.rank}{missing and f', waiting for rank {missing}'}",
            missing=operation.missing,
            sequence=operation.sequence,
        )
        waiting = self.waiting(operation.sequence)
        if operation.overdue or not waiting:
            return self.fail(operation, error)
        operation.overdue = True
        self.active.expect(operation, now + GRACE_S)
        return [self._aborts.abort(link, operation.sequence, error) for link in waiting]

    def fail(
        self, operation: Operation, error: ReductionError, told_by: Link | None = None
    ) -> list[Action]:
        """End an all-reduce badly, and tell the other reducers that it cannot be finished."""
        if self._spec.elastic and self.final is None and isinstance(error, RankLostError):
            # What another rank has finished, and this one will get from it, it is to keep.
            self.final = error
            self.freeze()
            return self.fail_all(error)
        if self._paused_s and isinstance(error, (RankLostError, ReducerLostError)):
            error = self._explain(error)
        actions = self.drop(operation, error)
        actions += self._aborts.tell(operation.sequence, error, told_by)
        return actions + self._fail_others(operation, error)

    def note_pause(self, seconds: float) -> None:
        """Take note that a reducer ended its connection because this process did not run.

        Until a result comes, that is why anything is lost.

        Args:
            seconds: for how long it did not run.
        """
        self._paused_s, self._results_before = seconds, self._results()

    def _explain(self, error: ReductionError) -> ReductionError:
        """Say that it was this rank that the others lost, whatever came of it here."""
        if self._results() != self._results_before:
            self._paused_s = 0.0  # the reducers have served this rank since
            return error
        return RankLostError(
            f"rank {self._spec.rank}, this process, did not run for {self._paused_s:.1f} s, and "
            "the others lost it: set REDUCTION_PATIENCE to more than that, so that they wait for "
            "it",
            rank=self._spec.rank,
        )

    def _results(self) -> int:
        """Return how many results have come, whoever has taken note of them."""
        return sum(self._flight.stats(link.index).results for link in self._links)

    def refuse(self, operation: Operation, error: ReductionError) -> list[Action]:
        """End an all-reduce that cannot begin at this rank, and tell the reducers why."""
        self.numbering.forget(operation, error)
        actions: list[Action] = [*self._aborts.tell(operation.sequence, error, None)]
        actions += self._ended(operation, error)
        return actions + self._fail_others(operation, error)

    def _fail_others(self, operation: Operation, error: ReductionError) -> list[Action]:
        """End badly what else is in progress of a call of which one all-reduce has failed."""
        actions: list[Action] = []
        for other in self._others(operation):
            actions += self.drop(other, error)
            actions += self._aborts.tell(other.sequence, error, None)
        return actions

    def _others(self, operation: Operation) -> list[Operation]:
        """Return the other all-reduces of a call that are in progress."""
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
        return [link for link in self._links if self._flight.waits_for(link.index, sequence)]


class Aborts:
    """What reducers are told, all of them: any may take the place of others later.

    Args:
        links: the session's.
        flight: knows the watermark.
        shard_map: knows the epoch.
        header: makes the header of a message.
    """

    def __init__(
        self,
        links: Sequence[Link],
        flight: Flight,
        shard_map: ShardMap,
        header: Callable[[MessageType], Header],
    ) -> None:
        self._links = links
        self._flight = flight
        self._map = shard_map
        self._header = header
        self._failed: deque[Failed] = deque()  # what some rank may not have finished

    def tell(self, sequence: int, error: ReductionError, told_by: Link | None) -> list[Send]:
        """Tell all reducers but the one that has told us that an all-reduce cannot be finished."""
        return self._note(Failed(sequence, sequence, error), told_by)

    def tell_finished(self, error: ReductionError) -> list[Send]:
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
        for link in self._links:
            if link.member and link is not told_by:
                link.untold.append(failed)
                sends += self.pay(link)
        return sends

    def welcomed(self, link: Link) -> None:
        """Take note that a reducer is to be told everything: it may be another process now."""
        link.untold = list(self._failed)

    def pay(self, link: Link) -> list[Send]:
        """Tell a reducer what has failed here and it was not told yet, as far as that may be."""
        sends = []
        limit = self._flight.watermark + MAX_ROUNDS_AHEAD  # nothing may be said of what is beyond
        while link.untold and link.member and link.untold[0].last < limit:
            sends.append(self._abort(link, link.untold.pop(0)))
        return sends

    def abort(self, link: Link, sequence: int, error: ReductionError) -> Send:
        """Give up an all-reduce."""
        return self._abort(link, Failed(sequence, sequence, error))

    def _abort(self, link: Link, failed: Failed) -> Send:
        header = self._header(MessageType.ABORT)._replace(
            sequence=failed.first, nbytes=failed.last - failed.first, epoch=self._map.epoch
        )
        return Send(link.index, header.pack(), encode_error(failed.error))


class RollCall:
    """What reducers have said of ranks.

    Args:
        links: the session's.
        shard_map: knows which reducers are in use.
        active: the all-reduces in progress.
        elastic: whether the ranks that are left go on elsewhere when one is lost.
    """

    def __init__(
        self, links: Sequence[Link], shard_map: ShardMap, active: Pending, *, elastic: bool
    ) -> None:
        self._links = links
        self._map = shard_map
        self._active = active
        self._elastic = elastic
        self._outdated: set[int] = set()  # links whose next PING may be from before the agreement
        self._lost: dict[int, tuple[int, ...]] = {}  # by link: ranks, if its reducer said so last

    @property
    def lost(self) -> set[int]:
        """Ranks that a reducer in use has lost, or that have left."""
        # One that cannot reach a rank, but is not in use, says nothing of that rank's life.
        said = tuple(self._lost.items())
        used = [ranks for link, ranks in said if self._map.uses(self._links[link].reducer)]
        return {rank for ranks in used for rank in ranks}

    def hear(self, link: Link, lost: tuple[int, ...], now: float) -> None:
        """Take note of the ranks that are lost at a reducer, by its latest PING."""
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
        self._outdated = {link.index for link in self._links}

    def begin(self, now: float) -> None:
        """See to it that it is soon asked whom an all-reduce waits for, if ranks are lost."""
        if self._lost:
            self._active.hurry(now)

    def answer(
        self, operation: Operation, link: Link, missing: Collection[int], now: float
    ) -> RankLostError | None:
        """Say whom an all-reduce waits for; return why it waits in vain, if it does."""
        # One that is missing may have gone on elsewhere without another one, which is lost.
        if lost := sorted(self.lost if self._elastic else self.lost.intersection(missing)):
            # This reducer cannot know: it was restarted, and that rank has never been there.
            why = f"rank {lost[0]}, which reducer {link.address} waits for, has left or was lost"
            return RankLostError(why, rank=lost[0])
        operation.missing = tuple(missing)
        waited = now - operation.begun
        if waited >= STRAGGLER_S and not operation.quiet:
            log.warning(
                "%s: reducer %s waits for rank %s, %.0f s so far",
                operation,
                link.address,
                ", ".join(map(str, missing)),
                waited,
            )
        return None
