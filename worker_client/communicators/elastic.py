"""Going on without lost ranks, and with ranks that join: a new membership of the job.

Every all-reduce is all or nothing. Either some rank that is left has its full result, with the lost
rank's contribution, and then all get that; or all make the call again, without the lost rank. To
that end each rank keeps a copy of what it contributes, and of each result until every rank has
finished the call. Who is present is agreed on by reconciling: a membership's name says who is to be
in it, and its first all-reduces end only when all of these have come.

Nobody goes on alone by mistake: those that are left must be more than half of those before, or half
with the lowest rank among them.

Ranks join behind an admission, a call whose result is how many do: all ranks get it or none. A rank
that has it goes to the membership with those that join, and waits there for all others. If a rank
is lost then, or later, some of the others may have gone on already, and some not even have the
result. So all ranks that made the admission reconcile among themselves first, where it comes to
light, and then with those that have joined. Only the next admission proves that all have gone on.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import LocalProtocolError, MismatchError, RankLostError, ReductionError
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.reconcile import NewLossError, Reconciliation
from worker_client.communicators.replay_log import Entry, ReplayLog
from worker_client.protocol.names import own
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.communicators.flat import FlatCommunicator
    from worker_client.communicators.membership import Membership
    from worker_client.protocol.spec import JobSpec

    Ended = Callable[[Operation, ReductionError | None], None]
    Left = Callable[[ReductionError], None]

KNOWN_S = 2.0  # after the job's patience: by then every reducer has said who is gone
ADMISSION = "ranks that join"
JOIN_S = 10.0  # for a rank that joins to come, when all others are here
LOOK_S = 0.1  # how often to look, while the ranks reconcile, whether they are still all there

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A new membership.

    Attributes:
        present: ranks that take part from now on, ascending.
        joined: those of them that did not before.
        lost: ranks that took part before and do not any more.
    """

    present: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]


class ElasticCommunicator:
    """Stands in for the driver of a client that goes on without lost ranks.

    Args:
        membership: that this rank begins in, or joins.
        joins: whether the others of it are at work already, and let this rank in.
        enter: makes a communicator in a membership, from its spec and whom to tell of ends.
        ended, left: as of `Driver`.
        timeout_s: for the ranks that are left to reconcile.
        connect_timeout_s: for the reducers to admit them.
        changed: called by the thread that reconciles, with every new membership.

    Attributes:
        communicator: in the current membership.
        lost: ranks that the job goes on without.
        membership: who is present.
    """

    def __init__(
        self,
        membership: Membership,
        enter: Callable[[JobSpec, Ended, Left], FlatCommunicator],
        ended: Ended,
        left: Left,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        joins: bool = False,
        changed: Callable[[Change], None] = lambda _: None,
    ) -> None:
        self.closing = False
        self.membership = membership
        everybody = range(membership.all.world_size)
        self.lost: frozenset[int] = frozenset(everybody).difference(membership.present)
        self._changed = changed
        self._enter = enter
        self._ended = ended
        self._left = left
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._replay_log = ReplayLog(joins=joins)
        self._joins = joins  # and is not in yet
        # Where ranks were admitted, and how many: if this rank was there, and not admitted. None
        # is ever forgotten, as no rank can know that all others have forgotten it.
        self._origins: list[tuple[Membership, int]] = []
        self._attempts: dict[Operation, Entry] = {}  # in progress in the current membership
        self._questions: dict[Operation, queue.SimpleQueue[ReductionError | None]] = {}
        self._suspects: set[int] = set()  # ranks that were lost since it began
        self._cause: ReductionError | None = None
        self._told = False  # whether another communicator has found that out, and has said so
        # Guards all of these. Whoever holds it waits for nobody.
        self._gate = threading.RLock()
        self._idle = threading.Condition(self._gate)  # told when an attempt has ended
        self._failure: ReductionError | None = None  # why there is no going on any more
        self._recovery: threading.Thread | None = None
        # Where ranks reconcile, or tried to, and who they are.
        self._coming: list[tuple[FlatCommunicator, tuple[int, ...]]] = []
        # To be left when all have reconciled: leaving looks like a loss.
        self._behind: list[FlatCommunicator] = []
        self._leaving: threading.Thread | None = None
        self._has_left = False
        self._ends: list[Entry] = []  # calls that reconciling has ended, to be told of
        self._last_question = -1  # sequence number of the reconciliation's last all-reduce
        self.communicator = self._connect(membership.spec)

    # -- as of Driver -------------------------------------------------------------------------

    @property
    def in_callback(self) -> bool:
        """Whether this thread leads; see `Driver.in_callback`."""
        return self.communicator.driver.in_callback

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce, when the ranks have reconciled if they are about to.

        Raises:
            LocalProtocolError: the client has stopped.
        """
        entry = Entry(operation)
        with self._gate:
            if self.closing:
                raise LocalProtocolError("this client was shut down")
            begun = self._replay_log.latest()
            if operation.refusal is not None and begun is not None and _same_call(begun, operation):
                begun.operation.refusal = operation.refusal
                if begun.attempt is not None and not begun.over:
                    self.communicator.driver.submit(operation)  # which ends the attempt
                return
            doomed = self._enter_call(entry)
        if doomed:
            self._report([entry])

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Lead for as long as the membership stays; see `Driver.wait`."""
        self.communicator.driver.wait(lambda: done() or self._recovery is not None, until)

    def admit(self, more: int, timeout_s: float) -> bool:
        """Let ranks in that wait: all ranks call this with no call in progress.

        Args:
            more: how many are ready to join, as far as this rank knows.
            timeout_s: for the other ranks to call this.

        Returns:
            Whether ranks have joined, the same at all ranks. They may be lost by now.

        Raises:
            LocalProtocolError: the client has stopped.
            ReductionError: it failed.
        """
        numbers = memoryview(array("q", [more])).cast("B")
        entry = Entry(Operation(numbers, DType.INT64, ReduceOp.MAX, ADMISSION, timeout_s))
        entry.admits = True
        with self._gate:
            if self.closing:
                raise LocalProtocolError("this client was shut down")
            self._enter_call(entry)
        self.wait(lambda: entry.over, math.inf)
        self.await_members(lambda: entry.over)
        if entry.error is not None:
            raise own(entry.error, entry.operation)
        return any(entry.result or b"")

    @property
    def failed(self) -> bool:
        """Whether this rank cannot go on any more, and others may."""
        return self._failure is not None

    @property
    def lost_at_admission(self) -> frozenset[int]:
        """Ranks that were lost when ranks joined last, the same at every rank."""
        origin, _ = self._origins[-1]
        return frozenset(range(origin.all.world_size)).difference(origin.present)

    def lose(self, ranks: frozenset[int]) -> None:
        """Go on without ranks that are lost elsewhere: these reducers may never have seen them."""
        with self._gate:
            news = sorted(
                (ranks - self.lost - self._suspects).intersection(self.membership.present)
            )
            if not news or self.closing:
                return
            self._suspects.update(news)
            self._told = self._recovery is None
            why = RankLostError(f"rank {news[0]} is lost", rank=news[0])
            self._cause = self._cause or why
            self._recover()
            present, communicator = self.membership.present, self.communicator
        # What is in progress waits for it, here and at others.
        communicator.driver.fail(RankLostError(str(why), rank=present.index(news[0])))

    def join(self) -> None:
        """Begin to wait for the others of the membership that this rank joins."""
        with self._gate:
            self._recover()

    def await_members(
        self, done: Callable[[], bool] = lambda: True, timeout_s: float | None = None
    ) -> bool:
        """Wait until the ranks have reconciled, if they are about to; false: not in that time.

        Raises:
            LocalProtocolError: the client has stopped.
            ReductionError: they cannot go on.
        """
        with self._gate:
            settled = self._idle.wait_for(
                lambda: self.closing or (done() and self._recovery is None), timeout_s
            )
            self._check_open()
            if self._failure is not None:
                raise self._failure
            return settled

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again.

        It returns before where waiting could last for ever, as `Driver.stop` does.
        """
        with self._gate:
            self.closing = True
            self._idle.notify_all()
            recovery = self._recovery
        if recovery not in {None, threading.current_thread()}:
            recovery.join(STOP_S)
        with self._gate:
            communicators = [communicator for communicator, _ in self._coming] + self._behind
        for communicator in [*communicators, self.communicator]:
            communicator.driver.stop()
        if self._leaving is not None:
            self._leaving.join()
        if self._failure is not None:
            self._leave_client(LocalProtocolError("this client was shut down"))

    # -- calls --------------------------------------------------------------------------------

    def _enter_call(self, entry: Entry) -> bool:
        """Begin a call, now or when the ranks have reconciled; return whether it has failed."""
        self._replay_log.add(entry)
        if self._failure is not None and not entry.over:
            entry.finish(None, self._failure)
        if not entry.over and self._recovery is None:
            self._begin(entry)
        return entry.over

    def _begin(self, entry: Entry) -> None:
        attempt = entry.begin()
        self._attempts[attempt] = entry
        self.communicator.driver.submit(attempt)

    def _attempt_ended(self, attempt: Operation, error: ReductionError | None) -> None:
        with self._gate:
            if (answer := self._questions.pop(attempt, None)) is not None:
                answer.put(error)
                return
            if attempt not in self._attempts:
                return  # it has merely ended another one
            entry = self._attempts.pop(attempt)
            if error is not None and self._may_be_made_again(error):
                self._cause = self._cause or self.membership.renumbered(error)
                self._recover()
                self._idle.notify_all()
                return
            told = None if error is None else self.membership.renumbered(error)
            entry.finish(bytes(attempt.view) if told is None else None, told)
            if self._admits(entry):
                self._recover()
            reached = self.communicator.session.flight.reached
            self._replay_log.prune(reached)
            if self._behind and reached > self._last_question:
                behind, self._behind = self._behind, []
                self._leaving = threading.Thread(target=_leave, args=(behind,), name="leave")
                self._leaving.start()
            self._idle.notify_all()
        self._ended(entry.operation, told)

    def _may_be_made_again(self, error: ReductionError) -> bool:
        """Whether a call failed because a rank was lost, as far as can be seen here."""
        if self.closing:
            return False
        if isinstance(error, RankLostError) and error.rank != self.communicator.session.spec.rank:
            self._suspects.add(self.membership.present[error.rank])
            return True
        # When ranks have heard of a loss in the middle of an agreement they begin anew.
        return isinstance(error, MismatchError) and error.field == "epoch"

    def _admits(self, entry: Entry) -> bool:
        """Take note of how many ranks a call lets in that has just ended; whether it does."""
        if not entry.admits or entry.result is None:
            return False
        (more,) = memoryview(entry.result).cast("q")
        if more:
            self._origins.append((self.membership, more))
        return more > 0

    # -- recovery -----------------------------------------------------------------------------

    def _recover(self) -> None:
        if self._recovery is None:
            self._recovery = threading.Thread(target=self._run, name="elastic", daemon=True)
            self._recovery.start()

    def _run(self) -> None:
        try:
            with self._gate:
                self._idle.wait_for(lambda: self.closing or not self._attempts)
            if not (self._grows or self._joins or self._await_loss(self.lost)):
                self._give_up(self._why)
                return
            while not self._reconcile():
                pass
        except ReductionError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("going on without lost ranks failed")
            self._give_up(LocalProtocolError(f"going on without lost ranks failed: {error!r}"))

    def _await_loss(self, known: frozenset[int]) -> bool:
        """Wait until somebody is lost besides those that are known; false: nobody, it seems."""
        end = time.monotonic() + self.membership.all.heartbeats.patience_s + KNOWN_S
        while not self.closing:
            with self._gate:
                for communicator, present in self._places():
                    self._suspects.update(present[rank] for rank in communicator.session.lost_ranks)
                if not self._suspects <= known:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def _reconcile(self) -> bool:
        """Reconcile with the ranks that are left and go on; false: more were lost.

        Raises:
            ReductionError: that cannot be.
        """
        with self._gate:
            lost = self.lost | frozenset(self._suspects)
            if self._grows and not self._coming:
                lost = self.lost  # those that join wait there, and hear of losses from who comes
        links = self.communicator.session.links
        visited = 0
        while lost != self.lost and visited < len(self._origins):
            # What has ended at any of these, an admission as well, ends at all of them here.
            origin = self._origins[visited][0].without(lost, links)
            if len(origin.present) > 1 and self._meet(origin, lost) is None:
                return False
            visited += 1
        while True:
            try:
                membership = self._next(lost)
            except RankLostError as error:
                self._failure = error  # now and later: others may go on
                raise
            reconciled = self._meet(membership, lost)
            if reconciled is None:
                return False
            if self._next(lost).all.world_size == membership.all.world_size:
                break  # else an admission has come to light
        communicator, last = reconciled
        self._go_on(communicator, membership, lost, last)
        return True

    @property
    def _grows(self) -> bool:
        """Whether ranks were admitted that this rank has yet to wait for."""
        if not self._origins:
            return False
        origin, more = self._origins[-1]
        return origin.all.world_size + more > self.membership.all.world_size

    def _next(self, lost: frozenset[int]) -> Membership:
        """Return the membership to go on in without these ranks.

        Raises:
            RankLostError: this rank is lost itself, or too few are left.
        """
        links = self.communicator.session.links
        base, more = self._origins[-1] if self._origins else (self.membership, 0)
        membership = base.without(lost, links, more)
        follows = self._grows or membership.may_follow(self.membership)
        # Ranks that have yet to hear of those that join count without them.
        if self._grows and lost != self.lost:
            follows = base.without(lost, links).may_follow(base)
        if not follows:
            raise self._why
        return membership

    def _meet(
        self, membership: Membership, lost: frozenset[int]
    ) -> tuple[FlatCommunicator, int] | None:
        """Reconcile with the other ranks of a membership; None: more were lost.

        Returns:
            Where, and the sequence number of the last all-reduce there.

        Raises:
            ReductionError: that cannot be.
        """
        here = self._joins and membership.spec.job == self.membership.spec.job
        communicator = self.communicator if here else self._connect(membership.spec)
        with self._gate:
            self._coming.append((communicator, membership.present))
        ask = partial(self._ask, communicator, membership, lost)
        reconciliation = Reconciliation(communicator.session.spec, ask, self._why)
        try:
            self._check_open()
            communicator.join(self._connect_timeout_s)
            reconciliation.run(self._replay_log, self._timeout_s)
        except (RankLostError, MismatchError, NewLossError) as error:
            self._fail_to_reconcile(communicator, membership, lost, error)
            return None
        except ReductionError as error:
            raise membership.renumbered(error) from None
        finally:
            self._ends += reconciliation.ends
            for entry in reconciliation.ends:
                self._admits(entry)
        return communicator, reconciliation.last

    def _fail_to_reconcile(
        self,
        communicator: FlatCommunicator,
        membership: Membership,
        lost: frozenset[int],
        error: Exception,
    ) -> None:
        """Find out who else is lost, and tell those that still wait there."""
        if isinstance(error, RankLostError):
            with self._gate:
                self._suspects.add(membership.present[error.rank])
        if not self._await_loss(lost):
            raise membership.renumbered(error) if isinstance(error, ReductionError) else self._why
        for rank in sorted(self._suspects - lost):
            why = f"rank {rank} is lost as well: its part in an earlier membership has ended"
            if rank in membership.present:
                communicator.driver.fail(RankLostError(why, rank=membership.present.index(rank)))

    def _go_on(
        self,
        communicator: FlatCommunicator,
        membership: Membership,
        lost: frozenset[int],
        last_question: int,
    ) -> None:
        """Make all calls that have no result, in the new membership."""
        with self._gate:
            self._check_open()
            places = [self.communicator, *(other for other, _ in self._coming)]
            self._behind += [place for place in places if place is not communicator]
            self._coming = []
            before, self.membership = self.membership.present, membership
            self.communicator, self.lost, self._joins = communicator, lost, False
            self._last_question = last_question
            self._suspects, self._cause = set(), None
            ends, self._ends = self._ends, []
            change = Change(
                membership.present,
                tuple(rank for rank in membership.present if rank not in before),
                tuple(rank for rank in before if rank in lost),
            )
            _log(logging.DEBUG if self._told else logging.WARNING, change, lost)
            self._told = False
        self._changed(change)
        with self._gate:
            self._recovery = None
            if self._suspects:
                self._recover()  # more were lost meanwhile
            for entry in self._replay_log:
                if entry.over:
                    entry.last = last_question
                elif self._recovery is None:
                    if entry.admits:  # those who were ready wait for an earlier membership
                        entry.contribution = bytes(len(entry.contribution))
                    self._begin(entry)
            self._idle.notify_all()
        self._report(ends)

    def _check_open(self) -> None:
        if self.closing:
            raise LocalProtocolError("this client was shut down")

    def _places(self) -> list[tuple[FlatCommunicator, tuple[int, ...]]]:
        """Return where this rank hears of losses, and the ranks that are present there."""
        return [(self.communicator, self.membership.present), *self._coming]

    @property
    def _why(self) -> ReductionError:
        lost = sorted(self._suspects - self.lost)
        if self._cause is None and lost:
            return RankLostError(f"rank {lost[0]} is lost while others join", rank=lost[0])
        return self._cause or LocalProtocolError("ranks that join could not be waited for")

    def _ask(
        self,
        communicator: FlatCommunicator,
        membership: Membership,
        lost: frozenset[int],
        question: Operation,
    ) -> None:
        """Make an all-reduce of a reconciliation, and wait for its end.

        Raises:
            NewLossError: one of those that are to reconcile is lost in the current membership, or
                one that joins does not come.
            ReductionError: it failed.
        """
        until = time.monotonic() + JOIN_S
        answer: queue.SimpleQueue[ReductionError | None] = queue.SimpleQueue()
        self._questions[question] = answer
        communicator.driver.submit(question)
        while True:
            self._check_open()
            try:
                error = answer.get(timeout=LOOK_S)
            except queue.Empty:
                lost_too = {
                    self.membership.present[rank] for rank in self.communicator.session.lost_ranks
                }
                missing = {membership.present[rank] for rank in question.missing}
                if time.monotonic() > until and missing.isdisjoint(self.membership.present):
                    with self._gate:
                        self._suspects |= missing
                    lost_too |= missing
                if not lost_too <= lost:
                    raise NewLossError from None
                continue
            if error is not None:
                raise error
            return

    def _give_up(self, error: ReductionError) -> None:
        """End all calls that have begun and have no result; later ones may try again."""
        with self._gate:
            self._recovery = None
            coming, self._coming = self._coming, []
            self._suspects, self._cause = set(), None
            self._told = False
            ends, self._ends = self._ends, []
            if self._joins or self._grows:
                self._failure = self._failure or error  # others may have gone on
            for entry in self._replay_log:
                if entry.over:
                    continue
                waited = entry.attempt is None and self.communicator.session.calls.final is None
                if waited and not self.closing:
                    self._begin(entry)  # it has merely waited, and others count it as well
                else:
                    entry.finish(None, error)
                    ends.append(entry)
            # Who does not go on must not be waited for.
            left = [communicator for communicator, _ in coming]
            left += [] if self._failure is None else [self.communicator]
            self._idle.notify_all()
        self._report(ends)
        for communicator in left:
            communicator.driver.stop()

    def _report(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._ended(entry.operation, entry.error and own(entry.error, entry.operation))

    def _leave_client(self, error: ReductionError) -> None:
        if not self._has_left:
            self._has_left = True
            self._left(error)

    def _connect(self, spec: JobSpec) -> FlatCommunicator:
        def left(error: ReductionError) -> None:
            if communicator is self.communicator and self._failure is None:
                self.closing = True  # if it has ended by itself
                self._leave_client(error)

        communicator = self._enter(spec, self._attempt_ended, left)
        return communicator


def _log(level: int, change: Change, lost: frozenset[int]) -> None:
    present = ", ".join(map(str, change.present))
    if change.joined:
        joined = ", ".join(map(str, change.joined))
        log.log(level, "rank %s joins; ranks that go on: %s", joined, present)
    if change.lost:
        log.log(
            level,
            "going on without rank %s; ranks that go on: %s (numbered from 0 on at the reducers)",
            ", ".join(map(str, sorted(lost))),
            present,
        )


def _same_call(entry: Entry, operation: Operation) -> bool:
    return entry.operation.call is operation.call


def _leave(communicators: list[FlatCommunicator]) -> None:
    for communicator in communicators:
        communicator.driver.stop()
