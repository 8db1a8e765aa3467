"""Tensors that are submitted one by one, under names, and reduced many at a time.

Calls with a name have a communicator of their own: a second membership of the same ranks at the
same reducers, over which this module's thread makes the same all-reduces in the same order at every
rank, whatever order the callers have. What is the same is found out in rounds (`negotiation`); a
round begins when there is something new and somebody waits for it, or a fusion buffer is full, or
nothing more has come for `cycle_s`. Nothing happens while nothing is asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    MismatchError,
    ReductionError,
    ReductionTimeout,
)
from reducer.wire.constants import ReduceOp
from worker_client.fusion.negotiation import JOIN, MOST_KNOWN, GivenUp, Negotiation, group
from worker_client.fusion.tensor_queue import Waiting
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import ServiceThread
from worker_client.runtime.trace import Trace
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.host_buffer import host_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from worker_client.communicators.communicator import Communicator
    from worker_client.fusion.negotiation import Decision, Tensor
    from worker_client.fusion.tensor_queue import MakeSubmissions, Request
    from worker_client.staging.wire_rule import WireRule
    from worker_client.work import Work

    StandIn = Callable[[Tensor], Any]

BURST = 20  # cycles that a tensor waits at most while others keep coming
LATE_S = 0.1  # of what waits for longer it is looked up which ranks lack it
AGAIN_S = 0.001  # rest after a round that was for nothing; then twice as long each time, ...
AGAIN_MOST_S = 0.05  # ... up to this: all ranks have something, but nothing in common
LOOK_S = 0.2  # how often to look at deadlines while a round waits for other ranks
LEAST_S = 0.001  # timeout of an all-reduce whose tensors have no time left
WHY_MOST = 500  # characters of a reason that other ranks are told
IDLE_BUFFERS = 4  # fusion buffers that wait for their next use: two in flight, two being filled
SMALLEST_BUFFER_BYTES = 1 << 16

# Of what negotiates, not of the tensors: ranks know of different ones, as a round failed somewhere.
_OUT_OF_STEP = {"name", "total_bytes", "dtype", "op", "epoch"}

log = logging.getLogger(__name__)


class Fusion:
    """Reduces named tensors; threads may share it.

    Args:
        make: makes the communicator; called once, by a thread of its own or in `open`.
        rank, world_size: who we are.
        threshold: most bytes of a fusion buffer; 0 to pack nothing.
        cycle_s: how long a tensor waits for the next one, seconds.
        timeout_s: of tensors whose caller names none.
        submissions: the implementation's.
        wire: which tensors are rounded to travel, and whether each of them travels alone.
        trace: shows what becomes of tensors, while there is a timeline.

    Attributes:
        calls: tensors that all ranks have had so far.
        bytes_reduced: of all tensors so far.
        waited_s: seconds from the latest submission until nothing was in progress, so far.
    """

    def __init__(
        self,
        make: Callable[[], Communicator],
        rank: int,
        world_size: int,
        threshold: int,
        *,
        cycle_s: float,
        timeout_s: float,
        submissions: MakeSubmissions,
        wire: WireRule,
        trace: Trace | None = None,
    ) -> None:
        self._make = make
        self._communicator: Communicator | None = None
        self._wire = wire
        self._trace = trace or Trace()
        self._threshold = threshold
        self._cycle_s = cycle_s
        self._negotiation = Negotiation(rank, world_size)
        self._buffers = fusion_buffers()
        self._waiting = Waiting(submissions, self._lead, timeout_s, threshold)
        self._submissions = self._waiting.submissions
        self._changed = self._waiting.changed
        self._urgent = False  # `changed` guards this, and what follows
        self._again_at = 0.0
        self._again_s = AGAIN_S
        self._why: ReductionError = LocalProtocolError("this client was shut down")
        self._flying: set[Request] = set()  # withdrawn, and not ended
        self._timeout_s = timeout_s
        # Calls that this rank does not make: that the others have not heard of, and that they heard
        # of in the latest round, which may have failed at some of them.
        self._untold: list[GivenUp] = []
        self._told: list[GivenUp] = []
        # Calls that another rank does not make, by name and number, which this one may still make.
        self._refused: dict[tuple[str, int], ReductionError] = {}
        self._joined: tuple[Work, StandIn] | None = None
        self.calls = 0
        self.bytes_reduced = 0
        self.waited_s = 0.0
        self._waited_from = 0.0  # the submission from which it was counted last
        self._thread = ServiceThread[None]("fusion", self._run)
        self._begun = False  # whether that was started for good, and not interrupted

    @property
    def communicator(self) -> Communicator | None:
        """The one in use, once there is one."""
        return self._communicator

    @property
    def busy(self) -> bool:
        """Whether a call with a name is in progress."""
        with self._changed:
            return bool(self._waiting) or bool(self._flying)

    @property
    def waiting(self) -> frozenset[str]:
        """Names of the calls that some rank has not made yet, as far as is known here."""
        return frozenset(self._submissions.requests)

    # -- any thread ---------------------------------------------------------------------------

    def open(self) -> None:
        """Make the communicator now, and not with the first call."""
        self._communicator = self._make()

    def submit(
        self,
        data: Any,
        op: str | ReduceOp,
        name: str,
        timeout: float | str | None,
        *,
        exact: bool = False,
        shape: str = "",
        residual: Any = None,
        check: Callable[[], None] | None = None,
    ) -> Work:
        """Start the all-reduce of a tensor, as soon as all ranks have submitted it.

        Args:
            data: as of `Client.all_reduce`, as are the others.
            op: reduction.
            name: the same at every rank, and not that of another one in progress.
            timeout: until it fails.
            exact: whether it travels as it is.
            shape: as there.
            residual: as there.
            check: called first; raises a ReductionError if the call may not be made.

        Raises:
            ConfigError: an argument is not supported, or another one of this name is in progress.
            ReductionError: the client was shut down, or its communicator has ended.
        """
        try:
            if check is not None:
                check()
            if not self._begun:
                self._begin()
            if residual is None:
                return self._submissions.submit(data, op, name, timeout, exact, shape)
            buffer = host_buffer(data)
            kept = self._wire.residual(residual, buffer.dtype, buffer.view.nbytes)
            with self._changed:  # the thread shall not have it before
                request = self._submissions.submit(data, op, name, timeout, exact, shape)
                request.residual = kept
            return request
        except LocalProtocolError:
            raise  # there are no calls any more
        except BaseException as error:
            mine = self._submissions.requests.get(name) if isinstance(name, str) else None
            # An interrupt may have come when it was accepted already: then it is made.
            if isinstance(error, ConfigError) or mine is None or mine.data is not data:
                self.decline(name, error)
            raise

    def join(self, data: Any, stand_in: StandIn) -> Work:
        """Start the sum of an array over all ranks that ends when no rank has anything else left.

        Until then this rank takes part in the others' calls. The timeout counts from the latest
        one.

        Args:
            data: as of `submit`.
            stand_in: returns what this rank contributes to a tensor of others, or raises a
                ReductionError that says why it does not; called in this object's thread.

        Raises:
            ConfigError, ReductionError: as `submit`.
        """
        request = self.submit(data, "sum", JOIN, None)
        self._joined = request, stand_in
        return request

    def decline(self, name: str, why: BaseException) -> None:
        """Use up the number of a call of this name that this rank does not make.

        It fails at the other ranks, which are told why.
        """
        if not isinstance(name, str):
            return  # there is no such call at any rank
        if not self._begun:
            self._begin()
        with self._changed:
            call = self._submissions.calls.get(name, 0)
            self._submissions.calls[name] = call + 1
            reason = f"{type(why).__name__}: {why}"[:WHY_MOST]
            self._untold.append(GivenUp(name, call, reason))
            self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            if not self.closing:
                self._thread.start()
                self._begun = True

    def stop(self) -> None:
        """Leave the communicator; what is in progress fails. May be called again."""
        with self._changed:
            self._submissions.refusal = self._why
            self._changed.notify_all()
        in_callback = self._thread.is_current
        if self._communicator is not None:
            in_callback |= self._communicator.in_callback
            self._communicator.stop()
        if not in_callback:
            self._thread.wait_for_end()

    def _lead(self, done: Callable[[], bool], until: float) -> None:
        if self._thread.is_current:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")
        with self._changed:
            self._urgent = bool(self._waiting)
            self._changed.notify_all()
        if self._communicator is not None:
            self._communicator.wait(done, until)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_turn():
                self._take_turn()
        except Exception as error:
            log.exception("fusion failed")
            self._why = LocalProtocolError(f"fusion failed: {error!r}")
        with self._changed:
            self._submissions.refusal = self._why
        if self._communicator is not None:
            self._communicator.stop()
        self._fail([*self._waiting.withdraw(), *self._flying], self._why)

    def _take_turn(self) -> None:
        """Begin a round, if there is something for one; nothing here keeps its calls afterwards."""
        if self._communicator is None:
            self._open_meanwhile()
            return
        with self._changed:
            mine = self._waiting.all()
            given_up = list(self._untold)
            news = self._submissions
            news.news_bytes, news.news_since, self._urgent = 0, None, False
        if mine or given_up:
            self._round(self._communicator, mine, given_up)

    def _open_meanwhile(self) -> None:
        """Make the communicator, and keep to deadlines: it may wait for ranks of this node."""
        opening: Future[None] = Future()

        def make() -> None:
            try:
                self.open()
            except BaseException as error:  # noqa: BLE001 (raised below)
                opening.set_exception(error)
            else:
                opening.set_result(None)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=make, name="fusion-open", daemon=True).start()
        while not opening.done():
            now = time.monotonic()
            self._look(now)
            with self._changed:
                if not opening.done():
                    left_s = self._waiting.next_deadline() - now
                    self._changed.wait(max(0.0, min(left_s, LOOK_S)))
        try:
            opening.result()
        except ReductionError as error:
            self._end_round(self._waiting.all(), error)

    def _await_turn(self) -> bool:
        """Wait until a round is due; return whether there will be one."""
        while not (self.closing or self._has_ended):
            now = time.monotonic()
            self._look(now)
            with self._changed:
                self._fail_refused()
                if not self._waiting:  # what has failed before any round is no news
                    self._submissions.news_bytes, self._submissions.news_since = 0, None
                due = self._due()
                if due <= now:
                    return True
                if not self.closing:
                    wait_s = min(due, self._waiting.next_deadline()) - now
                    idle = not (self._waiting or self._untold)
                    self._changed.wait(None if idle else min(wait_s, LOOK_S))
        return False

    def _look(self, now: float, besides: Collection[Request] = ()) -> None:
        """See to deadlines; the others hear of the calls that this rank gives up."""
        for request, error in self._waiting.look(now, besides):
            with self._changed:
                reason = f"{error}"[:WHY_MOST]
                given_up = GivenUp(request.tensor.name, request.call, reason, error.missing)
                self._untold.append(given_up)
            request.end(error)

    def _fail_refused(self) -> None:
        """Fail the calls that another rank does not make."""
        if not self._refused:
            return
        for request in self._waiting.all():
            if error := self._refused.pop((request.tensor.name, request.call), None):
                self._fail(self._waiting.withdraw([request.tensor.name]), error)

    @property
    def closing(self) -> bool:
        """Whether nothing may be submitted any more."""
        return self._submissions.refusal is not None

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended by itself: Ctrl-C in a callback, or a failure in the node."""
        return self._communicator is not None and self._communicator.closing

    def _due(self) -> float:
        """Return when the next round is to begin, in seconds of the monotonic clock."""
        if self._untold:
            return self._again_at
        if not self._waiting:
            return float("inf")
        news = self._submissions
        if news.news_since is None:
            return self._again_at  # others may have what is here
        if self._urgent or news.news_bytes >= self._threshold:
            return 0.0
        return min(news.news_until, news.news_since + BURST * self._cycle_s) + self._cycle_s

    def _round(
        self, communicator: Communicator, mine: list[Request], given_up: list[GivenUp]
    ) -> None:
        """Find out which tensors all ranks have, and reduce them; say which calls are given up."""
        try:
            decision = self._negotiate(communicator, mine, given_up)
        except ReductionError as error:
            self._end_round(mine, error)
            return
        if decision.void:
            self._begin_anew()
            self._rebase(decision.bases)
            return
        self._learn(given_up, decision)
        early = time.monotonic() - LATE_S
        for request in takewhile(lambda one: one.begun < early, mine):  # the oldest come first
            request.missing = self._negotiation.missing_ranks(request.key)
        for key, mismatch in decision.mismatched.items():
            waiting = self._submissions.requests.get(key.tensor.name)
            if waiting is not None and waiting.key == key:
                self._fail(self._waiting.withdraw([key.tensor.name]), mismatch)
        groups = [
            self._waiting.withdraw([name for name, *_ in tensors])
            for tensors in group(
                decision.ready, self._threshold, self._is_rounded, apart=self._wire.apart
            )
        ]
        self._flying.update(*groups)
        self.calls += sum(map(len, groups))
        for requests in groups:
            self._reduce(communicator, requests)
        self._rebase(decision.bases)
        self._attend()
        self._rest(productive=bool(decision.ready or decision.mismatched or decision.given_up))

    def _learn(self, given_up: list[GivenUp], decision: Decision) -> None:
        """Keep which calls ranks do not make: `given_up` is what this one has said."""
        with self._changed:
            del self._untold[: len(given_up)]
            self._told = given_up
            made = self._submissions.calls
            for (name, call), error in decision.given_up.items():
                waiting = self._submissions.requests.get(name)
                if call >= made.get(name, 0) or (waiting is not None and waiting.call == call):
                    self._refused[name, call] = error
            while len(self._refused) > MOST_KNOWN:
                del self._refused[next(iter(self._refused))]
            self._fail_refused()

    def _attend(self) -> None:
        """Take part in what others have, if this rank has joined."""
        if self._joined is None:
            return
        request, stand_in = self._joined
        if self._submissions.requests.get(JOIN) is not request:
            self._joined = None  # all have joined, or it failed
            return
        request.deadline = time.monotonic() + self._timeout_s
        for tensor, call in self._negotiation.wanted():
            with self._changed:
                made = self._submissions.calls
                own = tensor.name in self._submissions.requests
                if own or call < made.get(tensor.name, 0) or (tensor.name, call) in self._refused:
                    continue  # it fails by itself
                made[tensor.name] = call
            try:
                data = stand_in(tensor)
            except ReductionError as error:
                self.decline(tensor.name, error)
            else:
                with suppress(ReductionError):  # the client was shut down, as others hear
                    self.submit(
                        data, tensor.op, tensor.name, None, exact=tensor.exact, shape=tensor.shape
                    )

    def _rebase(self, bases: Mapping[str, int]) -> None:
        if not bases:
            return
        with self._changed:
            self._waiting.rebase(bases)
            self._untold, self._told = (
                [one._replace(call=one.call - bases.get(one.name, 0)) for one in given_up]
                for given_up in (self._untold, self._told)
            )
            self._refused = {
                (name, call - bases.get(name, 0)): error
                for (name, call), error in self._refused.items()
            }

    def _end_round(self, mine: list[Request], error: ReductionError) -> None:
        """Take note that a round has failed; what it was about may have another one."""
        self._begin_anew()
        if self._has_ended:
            self._why = error
        elif isinstance(error, ReductionTimeout):
            for request in mine:
                request.lacked_by(error.missing)
        elif not isinstance(error, MismatchError) or error.field not in _OUT_OF_STEP:
            with self._changed:
                self._untold = []  # the others' calls fail as these do
            self._fail(self._waiting.withdraw(one.tensor.name for one in mine), error)

    def _begin_anew(self) -> None:
        """Let this rank say everything again: others may have heard more of a round, or less."""
        self._negotiation.reset()
        self._rest(productive=False)
        with self._changed:
            self._untold[:0], self._told = self._told, []

    def _negotiate(
        self, communicator: Communicator, mine: list[Request], given_up: list[GivenUp]
    ) -> Decision:
        negotiation = self._negotiation
        asked = negotiation.ask(mine, given_up, self._submissions.calls)
        self._sum(communicator, asked, "tensors", mine)
        if (announcements := negotiation.hear()) is not None:
            self._sum(communicator, announcements, "announcements", mine)
        return negotiation.decide()

    def _sum(
        self,
        communicator: Communicator,
        data: np.ndarray[Any, Any],
        what: str,
        mine: list[Request],
    ) -> None:
        """Add over all ranks; while that waits for others, say so, and keep to deadlines."""
        # The name holds what ranks must have in common to understand each other.
        name = f"{what} {self._negotiation.state:08x}"
        now = time.monotonic()
        left_s = min((request.deadline for request in mine), default=now + self._timeout_s) - now
        view, dtype, _ = host_buffer(data)
        timeout_s = max(left_s, LEAST_S)
        operation = Operation(view, dtype, ReduceOp.SUM, name, timeout_s, lead=communicator.wait)
        communicator.submit(operation)
        while not operation.ends_within(LOOK_S):
            for request in mine:
                request.lacked_by(operation.missing)
            self._look(time.monotonic(), besides=mine)
        operation.wait()

    def _rest(self, productive: bool) -> None:
        self._again_s = AGAIN_S if productive else min(2 * self._again_s, AGAIN_MOST_S)
        self._again_at = 0.0 if productive else time.monotonic() + self._again_s

    # -- tensors that all ranks have ----------------------------------------------------------

    def _reduce(self, communicator: Communicator, requests: Sequence[Request]) -> None:
        """Start one all-reduce of tensors that all ranks have, in this order."""
        if len(requests) == 1:
            (request,) = requests
            self._start(
                communicator,
                request.view,
                requests,
                lambda error: self._finish(request, error),
                residual=request.residual,
            )
            return
        nbytes = sum(request.tensor.nbytes for request in requests)
        memory = self._buffers.take(nbytes)
        packed = memory.data[:nbytes]
        self._submissions.pack(requests, packed)
        kept = _packed_residuals(requests, nbytes)

        def unpack(error: Exception | None) -> None:
            if kept is not None:
                _unpack_residuals(requests, kept)
            if error is None:
                self._submissions.unpack(requests, packed)
            else:
                for request in requests:
                    request.end(error)
            self._flying.difference_update(requests)  # last, as in `_finish`
            self._note_end()
            self._buffers.give_back(memory)

        self._start(communicator, packed, requests, unpack, residual=kept)

    def _start(
        self,
        communicator: Communicator,
        view: memoryview,
        requests: Sequence[Request],
        finish: Callable[[Exception | None], object],
        *,
        residual: memoryview | None,
    ) -> None:
        first = requests[0].tensor
        name = f"{len(requests)} tensors from {first.name!r} on" if requests[1:] else first.name
        timeout_s = max(min(r.deadline for r in requests) - time.monotonic(), LEAST_S)
        if self._trace.timeline is not None:
            names = [request.tensor.name for request in requests]
            finish = self._trace.fused(names, min(r.begun for r in requests), finish)

        def ended(error: Exception | None) -> None:
            if error is None:
                self.bytes_reduced += view.nbytes
            finish(error)

        operation = Operation(
            view,
            first.dtype,
            first.op,
            name,
            timeout_s,
            rounded=self._is_rounded(first),
            residual=residual,
            ended=ended,
        )
        try:
            communicator.submit(operation)
        except ReductionError as error:
            finish(error)

    def _is_rounded(self, tensor: Tensor) -> bool:
        return not tensor.exact and self._wire.rounds(tensor.dtype, tensor.op, tensor.nbytes)

    def _finish(self, request: Request, error: Exception | None) -> None:
        request.end(error)
        self._flying.discard(request)  # last: what an interrupt leaves here ends in `_run`
        self._note_end()

    def _note_end(self) -> None:
        begun = self._submissions.news_until
        if begun != self._waited_from and not (self._flying or self._waiting):
            self._waited_from = begun
            self.waited_s += time.monotonic() - begun

    def _fail(self, requests: Iterable[Request], error: ReductionError) -> None:
        for request in list(requests):
            self._finish(request, error)


def fusion_buffers() -> BufferPool[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return a pool of fusion buffers: any that is large enough will do."""

    def allocate(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.empty(max(SMALLEST_BUFFER_BYTES, 1 << (nbytes - 1).bit_length()), np.uint8)

    return BufferPool(allocate, most=IDLE_BUFFERS, larger=True)


def _packed_residuals(requests: Sequence[Request], nbytes: int) -> memoryview | None:
    """Return the residuals of tensors that travel together, zeros where there is none."""
    if all(request.residual is None for request in requests):
        return None
    packed = np.zeros(nbytes, np.uint8).data
    for place, residual in _places(requests):
        packed[place] = residual
    return packed


def _unpack_residuals(requests: Sequence[Request], packed: memoryview) -> None:
    for place, residual in _places(requests):
        residual[:] = packed[place]


def _places(requests: Sequence[Request]) -> Iterator[tuple[slice, memoryview]]:
    """Yield each residual, and where it is among those of tensors that travel together."""
    end = 0
    for request in requests:
        begin, end = end, end + request.tensor.nbytes
        if request.residual is not None:
            yield slice(begin, end), request.residual
