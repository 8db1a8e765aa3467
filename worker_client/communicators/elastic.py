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
import threading
import time
from array import array
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import (
    LeavesMovedError,
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReductionError,
)
from reducer.wire.constants import DType, ReduceOp
from worker_client.communicators.communicator import Communicator, Counters, LinkTraffic
from worker_client.communicators.reconcile import NewLossError, Reconciliation
from worker_client.communicators.replay_log import ReplayEntry, ReplayLog
from worker_client.protocol.operation import Operation, own
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.wire.messages import Straggler
    from worker_client.communicators.membership import Membership
    from worker_client.protocol.spec import JobSpec

KNOWN_S = 2.0  # after the job's patience: by then every reducer has said who is gone
ADMISSION = "ranks that join"
JOIN_S = 10.0  # for a rank that joins to come, when all others are here
LOOK_S = 0.1  # how often to look, while the ranks reconcile, whether they are still all there

log = logging.getLogger(__name__)


class Change(NamedTuple):
    """A new membership."""

    present: tuple[int, ...]  # ranks that take part from now on, ascending
    joined: tuple[int, ...]  # those of them that did not before
    lost: tuple[int, ...]  # ranks that took part before and do not any more


@dataclass
class _Losses:
    """What has come to light since the membership began, until the ranks have reconciled."""

    suspects: set[int] = field(default_factory=set)  # ranks that were lost
    cause: ReductionError | None = None
    told: bool = False  # whether another communicator has found that out, and has said so
    # Where ranks reconcile, or tried to, and who they are.
    coming: list[tuple[Communicator, tuple[int, ...]]] = field(default_factory=list)
    ends: list[ReplayEntry] = field(default_factory=list)  # calls that ended there, to be told of


@dataclass
class _Earlier:
    """Where ranks were before, until all have reconciled: leaving looks like a loss."""

    communicators: list[Communicator] = field(default_factory=list)
    last_agreement: int = -1  # sequence number of the reconciliation's last all-reduce
    leaving: threading.Thread | None = None
    # Of all memberships so far but the one in use.
    counters: Counters = field(default_factory=Counters)
    traffic: LinkTraffic = field(default_factory=LinkTraffic)


class ElasticCommunicator(Communicator):
    """Goes on without lost ranks: a communicator for each membership, one after another.

    It begins in `membership`; if it `joins`, the others of that are at work already, and let this
    rank in. `enter` makes a communicator in a membership, from its spec and its `left`; `left` is
    called once, after the farewell. The ranks that are left have `timeout_s` to reconcile, the
    reducers `connect_timeout_s` to admit them.

    Attributes:
        on_change: called by the thread that reconciles, with every new membership.
        inner: in the current membership.
        lost: ranks that the job goes on without.
    """

    def __init__(
        self,
        membership: Membership,
        enter: Callable[[JobSpec, Callable[[], None]], Communicator],
        left: Callable[[], None],
        *,
        timeout_s: float,
        connect_timeout_s: float,
        joins: bool = False,
    ) -> None:
        self._closing = False
        self._spec = membership.all
        self.membership = membership
        everybody = range(membership.all.world_size)
        self.lost: frozenset[int] = frozenset(everybody).difference(membership.present)
        self.on_change: Callable[[Change], None] = lambda _: None
        self._enter = enter
        self._left: Callable[[], None] | None = left  # None: it was called
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._replay_log = ReplayLog(joins=joins)
        self._joins = joins  # and is not in yet
        # (membership, newcomers) of each admission that this rank voted in. None is ever
        # forgotten, as no rank can know that all others have forgotten it.
        self._origins: list[tuple[Membership, int]] = []
        self._attempts: set[ReplayEntry] = set()  # in progress in the current membership
        self._losses = _Losses()
        self._earlier = _Earlier()
        # Guards all of these; told when an attempt has ended. A thread that holds it never waits.
        self._gate = threading.Condition(threading.RLock())
        self._failure: ReductionError | None = None  # why there is no going on any more
        self._recovery: threading.Thread | None = None
        self.inner = self._connect(membership.spec)

    # -- the communicator -------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        return self._spec

    @property
    def world_size(self) -> int:
        return self.membership.all.world_size

    @property
    def present(self) -> tuple[int, ...]:
        return self.membership.present

    @property
    def contributors(self) -> tuple[int, ...]:
        return self._replay_log.contributors

    @property
    def straggler(self) -> Straggler | None:
        with self._gate:
            found, present = self.inner.straggler, self.membership.present
        return None if found is None else replace(found, rank=present[found.rank])

    @property
    def counters(self) -> Counters:
        return self._earlier.counters.plus(self.inner.counters)

    @property
    def traffic(self) -> LinkTraffic:
        with self._gate:
            latest = self.inner.traffic.renumbered(self.membership.present)
            return self._earlier.traffic.plus(latest)

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def busy(self) -> bool:
        return any(not entry.over for entry in self._replay_log)

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce, when the ranks have reconciled if they are about to."""
        entry = ReplayEntry(operation)
        with self._gate:
            self._check_open()
            share = operation.leaves
            moved = share is not None and (
                self._recovery is not None or share.present != self.membership.present
            )
            begun = self._replay_log.latest()
            if operation.refusal is not None and begun is not None and _same_call(begun, operation):
                self._refuse(begun, operation)
                return
            doomed = not moved and self._enter_call(entry)
        if moved:  # no rank makes this call: those that had begun it withdraw it
            operation.end(_moved())
        elif doomed:
            _report([entry])

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Move all-reduces on, for as long as the membership stays."""
        self.inner.wait(lambda: done() or self._recovery is not None, until)

    def stop(self) -> None:
        with self._gate:
            self._closing = True
            self._gate.notify_all()
            recovery = self._recovery
        if recovery not in {None, threading.current_thread()}:
            recovery.join(STOP_S)
        with self._gate:
            communicators = [communicator for communicator, _ in self._losses.coming]
            communicators += self._earlier.communicators
        for communicator in [*communicators, self.inner]:
            communicator.stop()
        if self._earlier.leaving is not None:
            self._earlier.leaving.join()
        if self._failure is not None:
            self._leave()

    # -- ranks that join, and ranks that are lost elsewhere -----------------------------------

    def admit(self, more: int, timeout_s: float) -> bool:
        """Let ranks in that wait: all ranks call this, in `timeout_s`, with no call in progress.

        `more` are ready to join, as far as this rank knows. Return whether ranks have joined, the
        same at all ranks; they may be lost by now.
        """
        numbers = memoryview(array("q", [more])).cast("B")
        entry = ReplayEntry(Operation(numbers, DType.INT64, ReduceOp.MAX, ADMISSION, timeout_s))
        entry.admits = True
        with self._gate:
            self._check_open()
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
        """Go on without ranks that are lost elsewhere: reducers here may never have seen them."""
        with self._gate:
            news = sorted(
                (ranks - self.lost - self._losses.suspects).intersection(self.membership.present)
            )
            if not news or self._closing:
                return
            self._losses.suspects.update(news)
            self._losses.told = self._recovery is None
            why = RankLostError(f"rank {news[0]} is lost", rank=news[0])
            self._losses.cause = self._losses.cause or why
            self._recover()
            present, communicator = self.membership.present, self.inner
        # What is in progress waits for it, here and at others.
        communicator.fail(RankLostError(str(why), rank=present.index(news[0])))

    def begin_joining(self) -> None:
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
            settled = self._gate.wait_for(
                lambda: self._closing or (done() and self._recovery is None), timeout_s
            )
            self._check_open()
            if self._failure is not None:
                raise self._failure
            return settled

    # -- calls --------------------------------------------------------------------------------

    def _enter_call(self, entry: ReplayEntry) -> bool:
        """Begin a call, now or when the ranks have reconciled; return whether it has failed."""
        if self._failure is not None:
            entry.finish(None, self._failure)
            return True
        self._replay_log.add(entry)
        if not entry.over and self._recovery is None:
            self._begin(entry)
        return entry.over

    def _begin(self, entry: ReplayEntry) -> None:
        attempt = entry.begin(partial(self._attempt_ended, entry))
        entry.operation.pieces = {attempt: None}
        self._attempts.add(entry)
        self.inner.submit(attempt)

    def _refuse(self, entry: ReplayEntry, refusal: Operation) -> None:
        """End a call that an interrupt has left half begun: the others hear why."""
        entry.operation.refusal = refusal.refusal
        if entry.over or self._recovery is not None:
            return

        # Ends in the place of the attempt, if that was never submitted; else ends the attempt.
        refusal.ended = partial(self._refusal_ended, entry, refusal)
        self._attempts.add(entry)
        self.inner.submit(refusal)

    def _refusal_ended(
        self, entry: ReplayEntry, refusal: Operation, error: ReductionError | None
    ) -> None:
        entry.attempt = refusal
        self._attempt_ended(entry, error)

    def _attempt_ended(self, entry: ReplayEntry, error: ReductionError | None) -> None:
        with self._gate:
            self._attempts.discard(entry)
            if entry.over:
                entry.operation.end(entry.error)  # an interrupt had ended that
                return
            if error is not None and self._may_be_made_again(error):
                self._losses.cause = self._losses.cause or self.membership.renumbered(error)
                self._recover()
                self._gate.notify_all()
                return
            told = None if error is None else self.membership.renumbered(error)
            entry.finish(
                bytes(entry.operation.view[: entry.operation.nbytes]) if told is None else None,
                told,
            )
            self._replay_log.contributors = self.membership.present
            if self._admits(entry):
                self._recover()
            reached = self.inner.reached
            self._replay_log.prune(reached)
            earlier = self._earlier
            if earlier.communicators and reached > earlier.last_agreement:
                behind, earlier.communicators = earlier.communicators, []
                earlier.leaving = threading.Thread(target=_stop, args=(behind,), name="leave")
                earlier.leaving.start()
            self._gate.notify_all()
        entry.operation.end(told)

    def _may_be_made_again(self, error: ReductionError) -> bool:
        """Whether a call failed because a rank was lost, as far as can be seen here."""
        if self._closing:
            return False
        if isinstance(error, RankLostError) and error.rank != self.membership.spec.rank:
            self._losses.suspects.add(self.membership.present[error.rank])
            return True
        # When ranks have heard of a loss in the middle of an agreement they begin anew.
        return isinstance(error, MismatchError) and error.field == "epoch"

    def _admits(self, entry: ReplayEntry) -> bool:
        """Record how many ranks a call lets in that has just ended; whether it does."""
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
                self._gate.wait_for(lambda: self._closing or not self._attempts)
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
        end = time.monotonic() + self.membership.all.heartbeats.peer_timeout_s + KNOWN_S
        while not self._closing:
            with self._gate:
                for communicator, present in self._places():
                    self._losses.suspects.update(present[rank] for rank in communicator.lost_ranks)
                if not self._losses.suspects <= known:
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
            lost = self.lost | frozenset(self._losses.suspects)
            if self._grows and not self._losses.coming:
                lost = self.lost  # those that join wait there, and hear of losses from who comes
        links = self.inner.links
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
        """Return the membership to go on in without these ranks."""
        links = self.inner.links
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
    ) -> tuple[Communicator, int] | None:
        """Reconcile with the other ranks of a membership; None: more were lost.

        Return where, and the sequence number of the last all-reduce there.
        """
        here = self._joins and membership.spec.job == self.membership.spec.job
        communicator = self.inner if here else self._connect(membership.spec)
        with self._gate:
            self._losses.coming.append((communicator, membership.present))
        ask = partial(self._ask, communicator, membership, lost)
        reconciliation = Reconciliation(membership.spec, ask, self._why)
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
            self._losses.ends += reconciliation.ends
            for entry in reconciliation.ends:
                self._admits(entry)
        return communicator, reconciliation.last

    def _fail_to_reconcile(
        self,
        communicator: Communicator,
        membership: Membership,
        lost: frozenset[int],
        error: Exception,
    ) -> None:
        """Find out who else is lost, and tell those that still wait there."""
        if isinstance(error, RankLostError):
            with self._gate:
                self._losses.suspects.add(membership.present[error.rank])
        if not self._await_loss(lost):
            raise membership.renumbered(error) if isinstance(error, ReductionError) else self._why
        for rank in sorted(self._losses.suspects - lost):
            why = f"rank {rank} is lost as well: its part in an earlier membership has ended"
            if rank in membership.present:
                communicator.fail(RankLostError(why, rank=membership.present.index(rank)))

    def _go_on(
        self,
        communicator: Communicator,
        membership: Membership,
        lost: frozenset[int],
        last_agreement: int,
    ) -> None:
        """Make all calls that have no result, in the new membership."""
        with self._gate:
            self._check_open()
            places = [self.inner, *(other for other, _ in self._losses.coming)]
            self._earlier.communicators += [one for one in places if one is not communicator]
            if communicator is not self.inner:
                self._earlier.counters, self._earlier.traffic = self.counters, self.traffic
            before, self.membership = self.membership.present, membership
            self.inner, self.lost, self._joins = communicator, lost, False
            self._earlier.last_agreement = last_agreement
            losses, self._losses = self._losses, _Losses()
            if losses.ends:  # their results were there before
                self._replay_log.contributors = before
            change = Change(
                membership.present,
                tuple(rank for rank in membership.present if rank not in before),
                tuple(rank for rank in before if rank in lost),
            )
            _log(logging.DEBUG if losses.told else logging.WARNING, change, lost)
        self.on_change(change)
        with self._gate:
            self._recovery = None
            if self._losses.suspects:
                self._recover()  # more were lost meanwhile
            for entry in self._replay_log.withdraw_leaves():
                entry.finish(None, _moved())
                losses.ends.append(entry)
            for entry in self._replay_log:
                if entry.over:
                    entry.last = last_agreement
                elif self._recovery is None:
                    if entry.admits:  # those who were ready wait for an earlier membership
                        entry.contribution = bytes(len(entry.contribution))
                    self._begin(entry)
            self._gate.notify_all()
        _report(losses.ends)

    def _check_open(self) -> None:
        if self._closing:
            raise LocalProtocolError("this client was shut down")

    def _places(self) -> list[tuple[Communicator, tuple[int, ...]]]:
        """Return where this rank hears of losses, and the ranks that are present there."""
        return [(self.inner, self.membership.present), *self._losses.coming]

    @property
    def _why(self) -> ReductionError:
        lost = sorted(self._losses.suspects - self.lost)
        if self._losses.cause is None and lost:
            return RankLostError(f"rank {lost[0]} is lost while others join", rank=lost[0])
        return self._losses.cause or LocalProtocolError("ranks that join could not be waited for")

    def _ask(
        self,
        communicator: Communicator,
        membership: Membership,
        lost: frozenset[int],
        agreement: Operation,
    ) -> None:
        """Make an all-reduce of a reconciliation, and wait for its end.

        Raises:
            NewLossError: one of those that are to reconcile is lost in the current membership, or
                one that joins does not come.
            ReductionError: it failed.
        """
        until = time.monotonic() + JOIN_S
        communicator.submit(agreement)
        while not agreement.ends_within(LOOK_S):
            lost_too = {self.membership.present[rank] for rank in self.inner.lost_ranks}
            missing = {membership.present[rank] for rank in agreement.missing}
            if time.monotonic() > until and missing.isdisjoint(self.membership.present):
                with self._gate:
                    self._losses.suspects |= missing
                lost_too |= missing
            if not lost_too <= lost:
                raise NewLossError
            self._check_open()
        agreement.wait()

    def _give_up(self, error: ReductionError) -> None:
        """End all calls that have begun and have no result; later ones may try again."""
        with self._gate:
            self._recovery = None
            losses, self._losses = self._losses, _Losses()
            if self._joins or self._grows:
                self._failure = self._failure or error  # others may have gone on
            for entry in self._replay_log:
                if entry.over:
                    continue
                waited = entry.attempt is None and self.inner.final is None
                if waited and not self._closing:
                    self._begin(entry)  # it has merely waited, and others count it as well
                else:
                    entry.finish(None, error)
                    losses.ends.append(entry)
            if self._failure is not None:
                self._replay_log.close()
            # Who does not go on must not be waited for.
            left = [communicator for communicator, _ in losses.coming]
            left += [] if self._failure is None else [self.inner]
            self._gate.notify_all()
        _report(losses.ends)
        for communicator in left:
            communicator.stop()

    def _leave(self) -> None:
        """End the rest of the calls, after the farewell."""
        left, self._left = self._left, None
        if left is None:
            return
        left()
        with self._gate:
            rest = [entry for entry in self._replay_log if not entry.over]
            for entry in rest:
                entry.finish(None, LocalProtocolError("this client was shut down"))
        _report(rest)

    def _connect(self, spec: JobSpec) -> Communicator:
        def left() -> None:
            if communicator is self.inner and self._failure is None:
                self._closing = True  # if it has ended by itself
                self._leave()

        communicator = self._enter(spec, left)
        return communicator


def _report(entries: list[ReplayEntry]) -> None:
    for entry in entries:
        entry.operation.end(entry.error)


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


def _moved() -> LeavesMovedError:
    return LeavesMovedError(
        "ranks were lost or have joined since the leaves of this step were dealt: make the whole "
        "step again, with what Client.leaves says now"
    )


def _same_call(entry: ReplayEntry, operation: Operation) -> bool:
    return entry.operation.call is operation.call


def _stop(communicators: list[Communicator]) -> None:
    for communicator in communicators:
        communicator.stop()
