"""Through a process group while no reducer is left, and back as soon as all ranks can use one.

When no reducer is left, first the calls end that some rank may not have finished: what any rank has
of their results, the others get from it; the rest is all-reduced. All ranks so have the same bits;
where the process group summed, these may differ from a reducer's in the last place, as it adds in
an order of its own.

With every call through it the ranks tell each other what they ask for, and so also, at no further
cost, whether they could go back. Each joins another job at the reducers, in which nothing has
happened yet. Once there is a reducer at which all are members of it, that call and all later ones
are made there. What has been submitted to the earlier job comes out of it, in its order, in this
communicator's thread, which passes it on; until the last of it has, later calls wait behind it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import LocalProtocolError, MismatchError, ReducerLostError, ReductionError
from reducer.wire.constants import PLACES, DType, ReduceOp
from worker_client.communicators.communicator import Communicator, Counters, LinkTraffic
from worker_client.communicators.membership import REDUCERS_TIMEOUT_S, marked
from worker_client.protocol.lifecycle import FIRST_PLACE, gaps, merge
from worker_client.protocol.operation import Operation, Unfinished, reason, refused
from worker_client.runtime.service_thread import STOP_S, ServiceThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.communicators.communicator import FlatCommunicator
    from worker_client.communicators.process_group import ProcessGroup
    from worker_client.protocol.spec import JobSpec

    HandOver = Callable[[list[Unfinished]], None]

_REFUSAL_SHOWN = 500

log = logging.getLogger(__name__)


class ReturnProposal(NamedTuple):
    """What a rank tells the others with a call."""

    attempt: int  # number of the job that it has joined, or tries to join
    usable_lanes: Sequence[int] = ()  # by reducer, of which it is a member


@dataclass
class Episode:
    """What one job at the reducers hands over when none of them is left."""

    begun: bool = False  # calls were handed over
    first: int = 0  # this and the next: as of `merge`, once the ranks have met
    shares: dict[int, list[Unfinished]] | None = None
    failure: ReductionError | None = None  # why no call succeeds any more
    over: bool = False  # the ranks have gone back; what is handed over is passed on there


class FallbackCommunicator(Communicator):
    """A flat communicator, and a process group of all ranks that stands in for its reducers.

    `enter` makes a communicator of a job, from its spec, its `left` and its `hand_over`; `left` is
    called once, after the farewell. `returns`: the ranks go back to the reducers. `announced`:
    another one says, at the same time, where all-reduces go.
    """

    def __init__(
        self,
        spec: JobSpec,
        enter: Callable[[JobSpec, Callable[[], None], HandOver], FlatCommunicator],
        group: ProcessGroup,
        left: Callable[[], None],
        *,
        returns: bool = True,
        announced: bool = False,
    ) -> None:
        self._spec = spec
        self._enter = enter
        self._group = group
        self._left = left
        self._may_return = returns
        self._level = logging.DEBUG if announced else logging.WARNING
        self._past = Counters()  # of earlier jobs, and of the process group
        self._traffic = LinkTraffic()  # of earlier jobs
        self._attempt = 1
        self._coming: FlatCommunicator | None = None  # where calls are to go
        self._stopped = False
        self._marker: Operation | None = None  # after all that the earlier one was given
        self._later: deque[Operation] = deque()  # submitted after the marker
        self._leaving: threading.Thread | None = None
        self._waiting: deque[tuple[Episode, Unfinished]] = deque()
        self._made: Unfinished | None = None  # the one that is being made
        self._thread: ServiceThread[list[tuple[Episode, Unfinished]]]
        self._thread = ServiceThread("fallback", self._run)
        # Guards `inner`, `_marker`, `_later`. This object's thread waits for nobody with it.
        self._gate = threading.RLock()
        self.inner = self._connect(spec)

    # -- the communicator -------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        return self._spec

    @property
    def counters(self) -> Counters:
        return self._past.plus(self.inner.counters)

    @property
    def traffic(self) -> LinkTraffic:
        return self._traffic.plus(self.inner.traffic)

    @property
    def closing(self) -> bool:
        return self._stopped or self.inner.closing

    @property
    def busy(self) -> bool:
        coming = self._coming is not None and self._coming.busy
        return self.inner.busy or coming or bool(self._waiting) or bool(self._later)

    @property
    def in_callback(self) -> bool:
        coming = self._coming is not None and self._coming.in_callback
        return self.inner.in_callback or coming or self._thread.is_current

    def submit(self, operation: Operation) -> None:
        with self._gate:
            if self.closing:
                raise LocalProtocolError("this client was shut down")
            if self._marker is None:
                self.inner.submit(operation)
            else:
                self._later.append(operation)

    def wait(self, done: Callable[[], bool], until: float) -> None:
        if self._thread.is_current:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")
        self.inner.wait(done, until)

    def stop(self) -> None:
        with self._gate:
            self._stopped = True
            communicators = [one for one in (self._coming, self.inner) if one is not None]
            leaving = self._leaving
        if self._thread.is_current:  # in a callback: nobody needs to wait for this thread
            self._group.stop()
            self._group.rest()
        for communicator in communicators:
            communicator.stop()
        if leaving is not None:
            leaving.join(STOP_S)

    def _connect(self, spec: JobSpec) -> FlatCommunicator:
        episode = Episode()

        def hand_over(calls: list[Unfinished]) -> None:
            self._take(episode, calls)

        def left() -> None:
            going_there = communicator is self._coming and self._marker is not None
            if communicator is self.inner or going_there:
                with self._gate:
                    self._stopped = True  # if it has ended by itself
                self._left()
                self._end_all()

        communicator = self._enter(spec, left, hand_over)
        return communicator

    def _take(self, episode: Episode, calls: list[Unfinished]) -> None:
        """Bring calls to their end, one after another.

        Their numbers go on from those of the time before; none is fine.
        """
        if calls and not episode.begun and not self._group.stopped:
            episode.begun = True
            log.log(self._level, "no reducer is left: all-reduces go through the process group now")
        self._thread.start()
        if calls:
            self._thread.queue.put([(episode, call) for call in calls])
        if self._group.stopped:
            self._end_rest()

    def _end_all(self) -> None:
        """Write to no buffer from now on, and end what is here."""
        self._group.stop()
        self._thread.queue.put([])
        if self._thread.ident is not None and not self._thread.is_current:
            self._group.await_rest()
        self._end_rest()

    def _end_rest(self) -> None:
        error = LocalProtocolError("this client was shut down")
        handed_over = [] if self._made is None else [self._made]
        handed_over += [one for _, one in list(self._waiting)]
        with suppress(queue.Empty):
            while True:
                handed_over += [one for _, one in self._thread.queue.get_nowait()]
        for operation in [*(one.operation for one in handed_over), *list(self._later)]:
            if operation is not None:
                operation.end(error)

    # -- the thread: through the process group ------------------------------------------------

    def _run(self) -> None:
        while self._await_call():
            episode, call = self._waiting.popleft()
            self._made = call
            try:
                if episode.shares is None:
                    others = [one for owner, one in self._waiting if owner is episode]
                    everywhere = self._group.exchange([one.told for one in (call, *others)])
                    episode.first, episode.shares = merge(
                        [[Unfinished(*one) for one in theirs] for theirs in everywhere]
                    )
                if episode.failure is None and not episode.over and call.number >= episode.first:
                    error = self._reduce(episode, call, episode.shares.pop(call.number, None))
                    if not episode.over:
                        self._end(call, error)
                if episode.over and episode.failure is None and not self._group.stopped:
                    self._forward(_asked_for(call))
            except Exception as error:  # noqa: BLE001 (its waiter gets it)
                if not self._group.stopped:
                    log.warning("the process group's all-reduce failed: %s", error)
                why = f"no reducer is left, and the process group failed as well: {error}"
                episode.failure = ReducerLostError(why, reducer="")
                episode.shares = {}
            if episode.failure is not None:
                self._end(call, episode.failure)
            if not self._group.stopped:  # else it has perhaps not ended
                self._made = None
        self._group.rest()

    def _await_call(self) -> bool:
        """Wait until there is a call; false: there will be none."""
        while not (self._waiting or self._group.stopped):
            self._waiting.extend(self._thread.queue.get())
        return not self._group.stopped

    def _end(self, call: Unfinished, error: ReductionError | None) -> None:
        if call.operation is None or self._group.stopped:
            return
        if error is None:
            self._past = self._past.plus(Counters(fallbacks=1))
        self._made = None  # before: its caller may shut the client down, which ends the rest
        call.operation.end(error)

    def _reduce(
        self, episode: Episode, call: Unfinished, shares: list[Unfinished] | None
    ) -> ReductionError | None:
        """Do what this rank must for a call, whether it needs the result or not.

        If the ranks go back with it, the stay is over, and the call is as it was. `shares` is what
        each rank has of it, or None for a call that none had begun. Return why it failed, the same
        at all ranks.
        """
        shares = shares or [Unfinished(call.number)] * self._group.size
        if any(share.failed for share in shares):
            rank = [share.failed for share in shares].index(True)
            why = f"no reducer is left, and the call had failed at rank {rank}"
            return ReducerLostError(why, reducer="")
        complete = any(share.done for share in shares)
        if not complete:
            error = self._disagreement(episode, call, shares)
            if error is not None or episode.over:
                return error
        known: dict[int, int] = {}  # where chunks begin, and end
        for rank, share in enumerate(shares):
            news = [chunk for chunk in share.chunks if chunk[0] not in known]
            known.update((low, high) for low, high in news)
            self._group.share(call.operation, rank, news, call.results)
        if not complete:
            operation = _asked_for(call)
            self._group.reduce(operation, gaps(known, operation.view.nbytes))
        return None

    def _disagreement(
        self, episode: Episode, call: Unfinished, shares: list[Unfinished]
    ) -> ReductionError | None:
        """Find out whether all ranks ask for the same, and none has refused it.

        Unless they can all go back to the reducers with this call, which then find that out.
        """
        operation = _asked_for(call)
        asked = {
            "refusal": reason(operation.refusal)[:_REFUSAL_SHOWN],
            "total_bytes": operation.view.nbytes,
            "dtype": operation.dtype.name,
            "op": operation.op.name,
            "name": operation.name or "",
        }
        while True:
            proposal = self._propose() if self._may_return else None
            said = self._group.exchange([call.number, asked, proposal])
            numbers, everywhere, proposals = zip(*said, strict=True)
            if call.number > min(numbers):
                continue  # some ranks have asked for more in a call before, which fails there
            if call.number < max(numbers):
                other = numbers.index(max(numbers))
                mine = (self._group.rank, call.number)
                return _mismatch("call", mine, (other, max(numbers)))
            begun = any(share.chunks for share in shares)
            if self._may_return and not begun and _may_leave(episode, call.number):
                episode.over = self._settle([ReturnProposal(*one) for one in proposals])
                if episode.over:
                    self._go_back()
                    return None
            for field in asked:
                for rank, theirs in enumerate(everywhere):
                    if field == "refusal" and theirs[field]:
                        return operation.refusal or refused(rank, theirs[field])
                    if theirs[field] != everywhere[0][field]:
                        return _mismatch(field, (0, everywhere[0][field]), (rank, theirs[field]))
            return None

    # -- the thread: back to the reducers -----------------------------------------------------

    def _propose(self) -> ReturnProposal:
        """Say where this rank could go on; it begins to join, if it does not yet."""
        if self._marker is None and not self._stopped:
            if self._coming is not None and self._coming.usable is None:
                self._try_another(self._attempt + 1)  # its reducers are gone again
            if self._coming is None:
                self._join_again()
            if self._coming is not None:
                return ReturnProposal(self._attempt, self._coming.usable or ())
        return ReturnProposal(self._attempt)

    def _settle(self, proposals: Sequence[ReturnProposal]) -> bool:
        """Find out from what all ranks offer with this call whether they go back with it."""
        if self._marker is not None:
            return False  # this rank is on its way back from an earlier stay
        latest = max(proposal.attempt for proposal in proposals)
        if latest > self._attempt:
            self._try_another(latest)
        if any(proposal.attempt != latest for proposal in proposals):
            return False
        usable_lanes = zip(*(proposal.usable_lanes for proposal in proposals), strict=False)
        return any(all(everywhere) for everywhere in usable_lanes)

    def _go_back(self) -> None:
        """Go back with the call that `_settle` was asked about: `_forward` gets it next."""
        log.log(self._level, "reducers are back: all-reduces go through them again")
        self._past = self._past.plus(Counters(returns=1))
        nothing = memoryview(b"")
        with self._gate:
            self._marker = Operation(nothing, DType.UINT8, ReduceOp.SUM, None, 1.0)
            with suppress(LocalProtocolError):  # the client ends
                self.inner.submit(self._marker)

    def _forward(self, operation: Operation) -> None:
        """Submit to the reducers what comes out of the earlier communicator."""
        if operation is self._marker:
            self._submit_waiting()
        else:
            self._submit_there(operation)

    def _submit_there(self, operation: Operation) -> None:
        assert self._coming is not None, "ranks go where they have joined"
        try:
            self._coming.submit(operation)
        except LocalProtocolError as error:  # it has stopped, and so all calls end
            operation.end(error)

    def _submit_waiting(self) -> None:
        """Submit what has waited; from then on calls take the straight way."""
        while True:
            with self._gate:
                if not self._later:
                    break_off = self._change_over()
                    break
                operation = self._later.popleft()
            self._submit_there(operation)
        if break_off is not None:
            break_off.start()

    def _change_over(self) -> threading.Thread | None:
        """Submit calls to the new communicator from now on; return what leaves the other."""
        assert self._coming is not None
        earlier, self.inner = self.inner, self._coming
        self._coming = self._marker = None
        self._attempt += 1
        self._past = self._past.plus(earlier.counters)
        self._traffic = self._traffic.plus(earlier.traffic)
        if self._stopped:
            return None
        self._leaving = threading.Thread(target=earlier.stop, name="leave", daemon=True)
        return self._leaving

    def _join_again(self) -> None:
        spec = replace(
            self._spec,
            job=marked(self._spec.job, ("after the process group", self._attempt)),
            reducers_timeout_s=REDUCERS_TIMEOUT_S,
            wait_s=0.0,  # a call waits meanwhile, which the process group can make
        )
        self._coming = coming = self._connect(spec)
        with self._gate:
            stopped = self._stopped
        if stopped:  # `stop` has not seen it
            coming.stop()

    def _try_another(self, attempt: int) -> None:
        """Give up the job that this rank tries to join, for another one."""
        self._attempt = attempt
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.stop()


def _may_leave(episode: Episode, number: int) -> bool:
    """Whether it begins a call, and no rank had begun a later one; all ranks agree."""
    assert episode.shares is not None, "the ranks have met"
    return number % PLACES == FIRST_PLACE and max(episode.shares, default=-1) < number


def _mismatch(field: str, one: tuple[int, object], other: tuple[int, object]) -> MismatchError:
    return MismatchError.between("call through the process group", field, one, other)


def _asked_for(call: Unfinished) -> Operation:
    if call.operation is None:
        raise RuntimeError(f"call {call.number} is over here, but no rank has its result")
    return call.operation
