"""Going on without ranks that are lost: the others make a new membership of the job by themselves.

Every all-reduce is all or nothing. Either some rank that is left has its full result, with the lost
rank's contribution, and then all get that; or all make the call again, without the lost rank. To
that end each rank keeps a copy of what it contributes, and of each result until every rank has
finished the call. Who is present is agreed on by reconciling: a membership's name says who is to be
in it, and its first all-reduces end only when all of these have come.

Nobody goes on alone by mistake: those that are left must be more than half of those before, or half
with the lowest rank among them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError, MismatchError, RankLostError, ReductionError
from worker_client.communicators.membership import Membership
from worker_client.communicators.reconcile import NewLossError, Reconciliation
from worker_client.communicators.replay_log import Entry, ReplayLog
from worker_client.protocol.names import own
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.communicators.flat import FlatCommunicator
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

    Ended = Callable[[Operation, ReductionError | None], None]
    Left = Callable[[ReductionError], None]

KNOWN_S = 2.0  # after the job's patience: by then every reducer has said who is gone
LOOK_S = 0.1  # how often to look, while the ranks reconcile, whether they are still all there

log = logging.getLogger(__name__)


class ElasticCommunicator:
    """Stands in for the driver of a client that goes on without lost ranks.

    Args:
        spec: of the job with all ranks.
        enter: makes a communicator in a membership, from its spec and whom to tell of ends.
        ended, left: as of `Driver`.
        timeout_s: for the ranks that are left to reconcile.
        connect_timeout_s: for the reducers to admit them.

    Attributes:
        communicator: in the current membership.
        lost: ranks that the job goes on without.
    """

    def __init__(
        self,
        spec: JobSpec,
        enter: Callable[[JobSpec, Ended, Left], FlatCommunicator],
        ended: Ended,
        left: Left,
        *,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.closing = False
        self.lost: frozenset[int] = frozenset()
        self._enter = enter
        self._ended = ended
        self._left = left
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._membership = Membership.whole(spec)
        self._replay_log = ReplayLog()
        self._attempts: dict[Operation, Entry] = {}  # in progress in the current membership
        self._questions: dict[Operation, queue.SimpleQueue[ReductionError | None]] = {}
        self._suspects: set[int] = set()  # ranks that were lost since it began
        self._cause: ReductionError | None = None
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
        self.communicator = self._connect(spec)

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
            self._replay_log.add(entry)
            if self._failure is not None and not entry.over:
                entry.finish(None, self._failure)
            doomed = entry.over
            if not doomed and self._recovery is None:
                self._begin(entry)
        if doomed:
            self._report([entry])

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Lead for as long as the membership stays; see `Driver.wait`."""
        self.communicator.driver.wait(lambda: done() or self._recovery is not None, until)

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
                self._cause = self._cause or self._membership.renumbered(error)
                self._recover()
                self._idle.notify_all()
                return
            told = None if error is None else self._membership.renumbered(error)
            entry.finish(bytes(attempt.view) if told is None else None, told)
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
            self._suspects.add(self._membership.present[error.rank])
            return True
        # When ranks have heard of a loss in the middle of an agreement they begin anew.
        return isinstance(error, MismatchError) and error.field == "epoch"

    # -- recovery -----------------------------------------------------------------------------

    def _recover(self) -> None:
        if self._recovery is None:
            self._recovery = threading.Thread(target=self._run, name="elastic", daemon=True)
            self._recovery.start()

    def _run(self) -> None:
        try:
            with self._gate:
                self._idle.wait_for(lambda: self.closing or not self._attempts)
            if not self._await_loss(self.lost):
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
        end = time.monotonic() + self._membership.all.heartbeats.patience_s + KNOWN_S
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
        try:
            membership = self._membership.without(lost, self.communicator.session.links)
            if not membership.may_follow(self._membership):
                raise self._why
        except RankLostError as error:
            self._failure = error  # now and later: others may go on
            raise
        communicator = self._connect(membership.spec)
        with self._gate:
            self._coming.append((communicator, membership.present))
        ask = partial(self._ask, communicator, lost)
        reconciliation = Reconciliation(communicator.session.spec, ask, self._why)
        try:
            self._check_open()
            communicator.join(self._connect_timeout_s)
            reconciliation.run(self._replay_log, self._timeout_s)
        except (RankLostError, MismatchError, NewLossError) as error:
            return self._fail_to_reconcile(communicator, membership, lost, error)
        except ReductionError as error:
            raise membership.renumbered(error) from None
        finally:
            self._ends += reconciliation.ends
        self._go_on(communicator, membership, lost, reconciliation.last)
        return True

    def _fail_to_reconcile(
        self,
        communicator: FlatCommunicator,
        membership: Membership,
        lost: frozenset[int],
        error: Exception,
    ) -> bool:
        """Find out who else is lost, and tell those that still wait there."""
        if isinstance(error, RankLostError):
            with self._gate:
                self._suspects.add(membership.present[error.rank])
        if not self._await_loss(lost):
            raise membership.renumbered(error) if isinstance(error, ReductionError) else self._why
        for rank in sorted(self._suspects - lost):
            why = f"rank {rank} is lost as well: its part in an earlier membership has ended"
            communicator.driver.fail(RankLostError(why, rank=membership.present.index(rank)))
        return False

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
            others = (other for other, _ in self._coming if other is not communicator)
            self._behind += [self.communicator, *others]
            self._coming = []
            self.communicator, self._membership, self.lost = communicator, membership, lost
            self._last_question = last_question
            self._suspects, self._cause = set(), None
            ends, self._ends = self._ends, []
            self._recovery = None
            log.warning(
                "going on without rank %s; ranks that go on: %s "
                "(numbered from 0 on at the reducers)",
                ", ".join(map(str, sorted(lost))),
                ", ".join(map(str, membership.present)),
            )
            for entry in self._replay_log:
                if entry.over:
                    entry.last = last_question
                else:
                    self._begin(entry)
        self._report(ends)

    def _check_open(self) -> None:
        if self.closing:
            raise LocalProtocolError("this client was shut down")

    def _places(self) -> list[tuple[FlatCommunicator, tuple[int, ...]]]:
        """Return where this rank hears of losses, and the ranks that are present there."""
        return [(self.communicator, self._membership.present), *self._coming]

    @property
    def _why(self) -> ReductionError:
        assert self._cause is not None, "there is a recovery because of something"
        return self._cause

    def _ask(
        self, communicator: FlatCommunicator, lost: frozenset[int], question: Operation
    ) -> None:
        """Make an all-reduce of a reconciliation, and wait for its end.

        Raises:
            NewLossError: one of those that are to reconcile is lost in the current membership.
            ReductionError: it failed.
        """
        answer: queue.SimpleQueue[ReductionError | None] = queue.SimpleQueue()
        self._questions[question] = answer
        communicator.driver.submit(question)
        while True:
            self._check_open()
            try:
                error = answer.get(timeout=LOOK_S)
            except queue.Empty:
                lost_too = {
                    self._membership.present[rank] for rank in self.communicator.session.lost_ranks
                }
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
            ends, self._ends = self._ends, []
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


def _same_call(entry: Entry, operation: Operation) -> bool:
    return entry.operation.call is operation.call


def _leave(communicators: list[FlatCommunicator]) -> None:
    for communicator in communicators:
        communicator.driver.stop()
