"""Going on without ranks that are lost: the others make a new membership of the job by themselves.

Every all-reduce is all or nothing. Either some survivor has its full result, with the lost rank's
contribution, and then all get that; or all make the call again, without the lost rank. To that end
each rank keeps a copy of what it contributes, and of each result until every rank has finished the
call. Who is present is agreed on by meeting: a membership's name says who is to be in it, and its
first all-reduces end only when all of these have come.

Nobody goes on alone by mistake: those that are left must be more than half of those before, or half
with the lowest rank among them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError, MismatchError, RankLostError, ReductionError
from worker_client.journal import Journal
from worker_client.meeting import Meeting, NewLossError
from worker_client.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.journal import Entry
    from worker_client.operation import Operation
    from worker_client.part import Part
    from worker_client.settings import Settings

    Ended = Callable[[Operation, ReductionError | None], None]
    Left = Callable[[list[tuple[Operation, ReductionError]], ReductionError], None]

KNOWN_S = 3.0  # by then every reducer has said who is gone
LOOK_S = 0.1  # how often to look, while the survivors meet, whether they are still all there

log = logging.getLogger(__name__)


class Survivors:
    """Stands in for the driver of a client that goes on without lost ranks.

    Args:
        settings: of the job with all ranks.
        enter: makes a part in a membership, from its settings and whom to tell of ends.
        ended, left: as of `Driver`.
        timeout_s: for the survivors to meet.
        connect_timeout_s: for the reducers to admit them.

    Attributes:
        part: in the current membership.
        lost: ranks that the job goes on without.
    """

    def __init__(
        self,
        settings: Settings,
        enter: Callable[[Settings, Ended, Left], Part],
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
        self._membership = Membership.whole(settings)
        self._journal = Journal()
        self._attempts: dict[Operation, Entry] = {}  # in progress in the current membership
        self._questions: dict[Operation, queue.SimpleQueue[ReductionError | None]] = {}
        self._suspects: set[int] = set()  # ranks that were lost since it began
        self._cause: ReductionError | None = None
        # Guards all of these. Whoever holds it waits for nobody.
        self._gate = threading.RLock()
        self._idle = threading.Condition(self._gate)  # told when an attempt has ended
        self._failure: ReductionError | None = None  # why there is no going on any more
        self._recovery: threading.Thread | None = None
        self._coming: list[tuple[Part, tuple[int, ...]]] = []  # where survivors meet, or tried to
        self._behind: list[Part] = []  # to be left when all have met: leaving looks like a loss
        self._last_question = -1  # sequence number of the meeting's last all-reduce
        self.part = self._make_part(settings)

    # -- as of Driver -------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce, when the survivors have met if they are about to.

        Raises:
            LocalProtocolError: the client has stopped.
        """
        with self._gate:
            if self.closing:
                raise LocalProtocolError("this client was shut down")
            failure = self._failure
            if failure is None:
                entry = self._journal.add(operation)
                if self._recovery is None:
                    self._begin(entry)
        if failure is not None:
            self._ended(operation, failure)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Lead for as long as the membership stays; see `Driver.wait`."""
        self.part.driver.wait(lambda: done() or self._recovery is not None, until)

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again."""
        with self._gate:
            self.closing = True
            self._idle.notify_all()
            recovery, parts = self._recovery, [part for part, _ in self._coming] + self._behind
        for part in parts:
            part.driver.stop()
        if recovery is not None and recovery is not threading.current_thread():
            recovery.join()
        self.part.driver.stop()

    # -- calls --------------------------------------------------------------------------------

    def _begin(self, entry: Entry) -> None:
        attempt = entry.begin()
        self._attempts[attempt] = entry
        self.part.driver.submit(attempt)

    def _attempt_ended(self, attempt: Operation, error: ReductionError | None) -> None:
        with self._gate:
            if (answer := self._questions.pop(attempt, None)) is not None:
                answer.put(error)
                return
            entry = self._attempts.pop(attempt)
            if error is not None and self._may_be_made_again(error):
                self._cause = self._cause or self._membership.translate(error)
                self._recover()
                self._idle.notify_all()
                return
            own = None if error is None else self._membership.translate(error)
            entry.finish(bytes(attempt.view) if own is None else None, own)
            reached = self.part.session.flight.reached
            self._journal.prune(reached)
            if self._behind and reached > self._last_question:
                behind, self._behind = self._behind, []
                threading.Thread(target=_leave, args=(behind,), name="leave", daemon=True).start()
            self._idle.notify_all()
        self._ended(entry.operation, own)

    def _may_be_made_again(self, error: ReductionError) -> bool:
        """Whether a call failed because a rank was lost, as far as can be seen here."""
        if self.closing:
            return False
        if isinstance(error, RankLostError) and error.rank != self.part.session.settings.rank:
            self._suspects.add(self._membership.present[error.rank])
            return True
        # When ranks have heard of a loss in the middle of an agreement they begin anew.
        return isinstance(error, MismatchError) and error.field == "epoch"

    # -- recovery -----------------------------------------------------------------------------

    def _recover(self) -> None:
        if self._recovery is None:
            self._recovery = threading.Thread(target=self._run, name="survivors", daemon=True)
            self._recovery.start()

    def _run(self) -> None:
        try:
            with self._gate:
                self._idle.wait_for(lambda: self.closing or not self._attempts)
            if not self._await_loss(self.lost):
                self._give_up(self._why, forever=False)
                return
            while not self.closing and not self._meet():
                pass
        except ReductionError as error:
            self._give_up(error)
        except Exception as error:
            log.exception("going on without lost ranks failed")
            self._give_up(LocalProtocolError(f"going on without lost ranks failed: {error!r}"))

    def _await_loss(self, known: frozenset[int]) -> bool:
        """Wait until somebody is lost besides those that are known; false: nobody, it seems."""
        end = time.monotonic() + KNOWN_S
        while not self.closing:
            with self._gate:
                for part, present in self._places():
                    self._suspects.update(present[rank] for rank in part.session.gone)
                if not self._suspects <= known:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def _meet(self) -> bool:
        """Meet the other survivors and go on with them; false: more ranks were lost.

        Raises:
            ReductionError: that cannot be.
        """
        with self._gate:
            lost = self.lost | frozenset(self._suspects)
            membership = self._membership.without(lost, self.part.session.links)
        if not membership.may_follow(self._membership):
            raise self._why
        part = self._make_part(membership.settings)
        with self._gate:
            self._coming.append((part, membership.present))
        try:
            part.join(self._connect_timeout_s)
            meeting = Meeting(part.session.settings, lambda call: self._ask(part, call, lost))
            meeting.run(self._journal, self._timeout_s)
        except (RankLostError, MismatchError, NewLossError) as error:
            if isinstance(error, RankLostError):
                with self._gate:
                    self._suspects.add(membership.present[error.rank])
            if self._await_loss(lost):
                return False
            raise
        except ReductionError as error:
            raise membership.translate(error) from None
        log.warning(
            "going on without rank %s: %s are left, which reducers number from 0 on",
            ", ".join(map(str, sorted(lost))),
            ", ".join(map(str, membership.present)),
        )
        self._go_on(part, membership, lost, meeting)
        return True

    def _go_on(
        self, part: Part, membership: Membership, lost: frozenset[int], meeting: Meeting
    ) -> None:
        """Make all calls that have no result, in the new membership."""
        with self._gate:
            self._behind += [self.part, *(other for other, _ in self._coming if other is not part)]
            self._coming = []
            self.part, self._membership, self.lost = part, membership, lost
            self._last_question = meeting.last
            self._suspects, self._cause = set(), None
            ends = meeting.ends
            self._recovery = None
            for entry in list(self._journal):
                if entry.over:
                    entry.last = meeting.last
                else:
                    self._begin(entry)
        for entry in ends:
            self._ended(entry.operation, entry.error)

    def _places(self) -> list[tuple[Part, tuple[int, ...]]]:
        """Return where this rank hears of losses, and the ranks that are present there."""
        return [(self.part, self._membership.present), *self._coming]

    @property
    def _why(self) -> ReductionError:
        assert self._cause is not None, "there is a recovery because of something"
        return self._cause

    def _ask(self, part: Part, question: Operation, lost: frozenset[int]) -> None:
        """Make an all-reduce of a meeting, and wait for its end.

        Raises:
            NewLossError: one of those that are to meet is lost in the current membership.
            ReductionError: it failed.
        """
        answer: queue.SimpleQueue[ReductionError | None] = queue.SimpleQueue()
        self._questions[question] = answer
        part.driver.submit(question)
        while True:
            try:
                error = answer.get(timeout=LOOK_S)
            except queue.Empty:
                gone = {self._membership.present[rank] for rank in self.part.session.gone}
                if not gone <= lost:
                    raise NewLossError from None
                continue
            if error is not None:
                raise error
            return

    def _give_up(self, error: ReductionError, *, forever: bool = True) -> None:
        """End all calls that have no result, and perhaps all later ones."""
        with self._gate:
            self._recovery = None
            coming, self._coming = self._coming, []
            self._suspects, self._cause = set(), None
            self._failure = error if forever else None
            entries = [entry for entry in self._journal if not entry.over]
            for entry in entries:
                entry.finish(None, error)
        for part, _ in coming:
            part.driver.stop()
        for entry in entries:
            self._ended(entry.operation, error)

    def _make_part(self, settings: Settings) -> Part:
        def left(failed: list[tuple[Operation, ReductionError]], error: ReductionError) -> None:
            for one in failed:
                self._attempt_ended(*one)
            if part is self.part:  # not a membership that the job has left behind
                self._left([], error)

        part = self._enter(settings, self._attempt_ended, left)
        return part


def _leave(parts: list[Part]) -> None:
    for part in parts:
        part.driver.stop()
