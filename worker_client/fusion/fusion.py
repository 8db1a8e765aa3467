"""Tensors that are submitted one by one, under names, and reduced many at a time.

Calls with a name have a communicator of their own: a second membership of the same ranks at the
same reducers, over which this module's thread makes the same all-reduces in the same order at every
rank, whatever order the callers have. What is the same is found out in rounds (`negotiation`); a
round begins when there is something new and somebody waits for it, or a fusion buffer is full, or
nothing more has come for `cycle_s`. Nothing happens while nothing is asked for.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
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
from worker_client.communicators.communicator import LinkTraffic
from worker_client.fusion import _tensor_queue
from worker_client.fusion.negotiation import JOIN, Negotiation, group
from worker_client.fusion.tensor_queue import LOOK_S, TensorQueue
from worker_client.protocol.operation import Operation
from worker_client.runtime.service_thread import ServiceThread
from worker_client.runtime.trace import Trace
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.host_buffer import host_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from worker_client.communicators.communicator import Communicator
    from worker_client.fusion.negotiation import GivenUp, RoundDecision, Tensor
    from worker_client.fusion.tensor_queue import Request
    from worker_client.protocol import _flight
    from worker_client.staging.wire_rule import WireRule
    from worker_client.work import Work

    StandIn = Callable[[Tensor], Any]

LATE_S = 0.1  # of what waits for longer it is looked up which ranks lack it
AGAIN_S = 0.001  # rest after a round that was for nothing; then twice as long each time, ...
AGAIN_MOST_S = 0.05  # ... up to this: all ranks have something, but nothing in common
LEAST_S = 0.001  # timeout of an all-reduce whose tensors have no time left
IDLE_BUFFERS = 4  # fusion buffers that wait for their next use: two in flight, two being filled
SMALLEST_BUFFER_BYTES = 1 << 16

# A round that fails with one of these says nothing of its tensors: ranks know of different ones,
# as an earlier round has failed at some of them. It is made again.
_OUT_OF_STEP = {"name", "total_bytes", "dtype", "op", "epoch"}

log = logging.getLogger(__name__)


class Fusion:
    """Reduces named tensors; threads may share it.

    Args:
        make: makes the communicator; called once, by a thread of its own or in `open`.
        threshold: most bytes of a fusion buffer; 0 to pack nothing.
        cycle_s: how long a tensor waits for the next one, seconds.
        timeout_s: of tensors whose caller names none.
        wire: which tensors are rounded to travel, and whether each of them travels alone.
        trace: shows what becomes of tensors, while there is a timeline.

    Attributes:
        calls: tensors that all ranks have had so far.
        bytes_reduced: of all tensors so far.
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
        wire: WireRule,
        trace: Trace | None = None,
    ) -> None:
        self._make = make
        self._communicator: Communicator | None = None
        self._traffic = LinkTraffic()  # of earlier ones
        self._wire = wire
        self._trace = trace or Trace()
        self._threshold = threshold
        self._timeout_s = timeout_s
        self._negotiation = Negotiation(rank, world_size)
        self._buffers = fusion_buffers()
        self._queue = TensorQueue(self._lead, timeout_s, threshold, cycle_s)
        self._again_at = 0.0
        self._again_s = AGAIN_S
        self._why: ReductionError = LocalProtocolError("this client was shut down")
        self._joined: tuple[Work, StandIn] | None = None
        self.calls = 0
        self.bytes_reduced = 0
        self._thread = ServiceThread[None]("fusion", self._run)
        self._begun = False  # whether that was started for good, and not interrupted

    @property
    def communicator(self) -> Communicator | None:
        """The one in use, once there is one."""
        return self._communicator

    @property
    def busy(self) -> bool:
        """Whether a call with a name is in progress."""
        return self._queue.busy

    @property
    def closing(self) -> bool:
        """Whether nothing may be submitted any more."""
        return self._queue.refusal is not None

    @property
    def waiting(self) -> frozenset[str]:
        """Names of the calls that some rank has not made yet, as far as is known here."""
        return frozenset(self._queue.requests)

    @property
    def waited_s(self) -> float:
        """Seconds from the latest submission until nothing was in progress, so far."""
        return self._queue.waited_s

    @property
    def traffic(self) -> LinkTraffic:
        """What the links of all communicators have carried so far."""
        communicator, before = self._communicator, self._traffic
        return before if communicator is None else before.plus(communicator.traffic)

    @property
    def durations(self) -> _flight.Durations:
        """How long the calls that have ended well took, each from its submission to its end."""
        return self._queue.durations

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

        The arguments are those of `Client.all_reduce`, but for `check`: called first, it raises a
        ReductionError if the call may not be made.

        Raises:
            ConfigError: an argument is not supported, or another one of this name is in progress.
            ReductionError: the client was shut down, or its communicator has ended.
        """
        try:
            if check is not None:
                check()
            if not self._begun:
                self._begin()
            kept = None
            if residual is not None:
                buffer = host_buffer(data)
                kept = self._wire.residual(residual, buffer.dtype, buffer.view.nbytes)
            return self._queue.submit(data, op, name, timeout, exact, shape, kept)
        except LocalProtocolError:
            raise  # there are no calls any more
        except BaseException as error:
            # An interrupt may have come when it was accepted already: then it is made.
            if isinstance(error, ConfigError) or not self._queue.accepted(name, data):
                self.decline(name, error)
            raise

    def join(self, data: Any, stand_in: StandIn) -> Work:
        """Start the sum of an array over all ranks that ends when no rank has anything else left.

        Until then this rank takes part in the others' calls: `stand_in`, called in this object's
        thread, returns what it contributes to a tensor, or raises a ReductionError that says why it
        does not. The timeout counts from the latest one.

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
        self._queue.decline(name, why)

    def _begin(self) -> None:
        with self._queue.changed:
            if not self.closing:
                self._thread.start()
                self._begun = True

    def stop(self) -> None:
        """Leave the communicator; what is in progress fails. May be called again."""
        self._queue.close(self._why)
        in_callback = self._thread.is_current
        if self._communicator is not None:
            in_callback |= self._communicator.in_callback
            self._communicator.stop()
        if not in_callback:
            self._thread.wait_for_end()

    def follow(self, earlier: Fusion) -> None:
        """Take the place of an earlier one, which stops, and count on from there."""
        earlier.stop()
        self.calls += earlier.calls
        self.bytes_reduced += earlier.bytes_reduced
        self._queue.waited_s += earlier.waited_s
        self.durations.merge(earlier.durations)
        self._traffic = earlier.traffic

    def _lead(self, done: Callable[[], bool], until: float) -> None:
        if self._thread.is_current:
            raise LocalProtocolError("waiting in a callback of an all-reduce would last for ever")
        self._queue.hurry()
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
        self._queue.close(self._why)
        if self._communicator is not None:
            self._communicator.stop()
        self._queue.end_all(self._why)

    def _await_turn(self) -> bool:
        """Wait until a round is due; return whether there will be one."""
        while not (self.closing or self._has_ended):
            now = time.monotonic()
            self._queue.expire(now)
            if self._queue.await_round(now, self._again_at):
                return True
        return False

    def _take_turn(self) -> None:
        """Begin a round, if there is something for one; nothing here keeps its calls afterwards."""
        if self._communicator is None:
            self._open_meanwhile()
            return
        mine, given_up = self._queue.begin_round()
        if mine or given_up:
            self._round(self._communicator, mine, given_up)

    def _open_meanwhile(self) -> None:
        """Make the communicator, and keep to deadlines: it may wait for ranks of this node."""
        opening: concurrent.futures.Future[None] = concurrent.futures.Future()

        def make() -> None:
            try:
                self.open()
            except BaseException as error:  # noqa: BLE001 (raised below)
                opening.set_exception(error)
            else:
                opening.set_result(None)

        threading.Thread(target=make, name="fusion-open", daemon=True).start()
        while not opening.done():
            now = time.monotonic()
            self._queue.expire(now)
            left_s = self._queue.next_deadline() - now
            concurrent.futures.wait([opening], max(0.0, min(left_s, LOOK_S)))
        try:
            opening.result()
        except ReductionError as error:
            self._end_round(self._queue.all(), error)

    @property
    def _has_ended(self) -> bool:
        """Whether it has ended by itself: Ctrl-C in a callback, or a failure in the node."""
        return self._communicator is not None and self._communicator.closing

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
            self._queue.rebase(decision.bases)
            return
        self._queue.learn(given_up, decision)
        early = time.monotonic() - LATE_S
        for request in takewhile(lambda one: one.begun < early, mine):  # the oldest come first
            request.missing = self._negotiation.missing_ranks(request.key)
        together = group(decision.ready, self._threshold, self._is_rounded, apart=self._wire.apart)
        groups = [self._queue.take(tensor.name for tensor in tensors) for tensors in together]
        self.calls += sum(map(len, groups))
        for requests in groups:
            self._reduce(communicator, requests)
        self._queue.rebase(decision.bases)
        self._attend()
        self._rest(productive=bool(decision.ready or decision.mismatched or decision.given_up))

    def _attend(self) -> None:
        """Take part in what others have, if this rank has joined."""
        if self._joined is None:
            return
        request, stand_in = self._joined
        mine = self._queue.requests.get(JOIN)
        if mine is None or mine is not request:
            self._joined = None  # all have joined, or it failed
            return
        mine.deadline = time.monotonic() + self._timeout_s
        for tensor, call in self._negotiation.wanted():
            if not self._queue.stand_in(tensor, call):
                continue
            try:
                data = stand_in(tensor)
            except ReductionError as error:
                self.decline(tensor.name, error)
            else:
                with suppress(ReductionError):  # the client was shut down, as others hear
                    self.submit(
                        data, tensor.op, tensor.name, None, exact=tensor.exact, shape=tensor.shape
                    )

    def _end_round(self, mine: list[Request], error: ReductionError) -> None:
        """Record that a round has failed; what it was about may have another one."""
        self._begin_anew()
        if self._has_ended:
            self._why = error
        elif isinstance(error, ReductionTimeout):
            for request in mine:
                request.lacked_by(error.missing)
        elif not isinstance(error, MismatchError) or error.field not in _OUT_OF_STEP:
            self._queue.forget_untold()
            self._queue.fail((one.tensor.name for one in mine), error)

    def _begin_anew(self) -> None:
        self._negotiation.reset()
        self._rest(productive=False)
        self._queue.round_failed()

    def _negotiate(
        self, communicator: Communicator, mine: list[Request], given_up: list[GivenUp]
    ) -> RoundDecision:
        negotiation = self._negotiation
        asked = negotiation.ask(mine, given_up, self._queue.calls)
        self._sum(communicator, asked, "tensors", mine)
        if (announcements := negotiation.decode()) is not None:
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
            self._queue.expire(time.monotonic(), besides=mine)
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
                lambda error: self._queue.end(requests, error),
                residual=request.residual,
            )
            return
        nbytes = sum(request.tensor.nbytes for request in requests)
        memory = self._buffers.take(nbytes)
        packed = memory.data[:nbytes]
        _tensor_queue.pack(requests, packed)
        kept = _packed_residuals(requests, nbytes)

        def unpack(error: Exception | None) -> None:
            if kept is not None:
                _unpack_residuals(requests, kept)
            self._queue.end(requests, error, packed)
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
