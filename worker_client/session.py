"""The worker's protocol logic: join, failures, deadlines, farewell (sans I/O).

Events and `now` go in, actions come out; the rules are those of `reducer/wire/README.md`. What is
healthy and frequent, contributions and results, is the flight's business.
"""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import (
    MismatchError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import MAX_CHUNK_BYTES, MAX_ROUNDS_AHEAD, NO_SEQUENCE, MessageType
from reducer.wire.header import Buffer, Header, check_chunk, fingerprint
from reducer.wire.messages import (
    Hello,
    Welcome,
    decode,
    decode_error,
    encode,
    encode_error,
)
from reducer.wire.states import LinkState, Role, after
from worker_client.flight import Send
from worker_client.flow import FlowControl
from worker_client.link import Link
from worker_client.names import Names, own
from worker_client.plan import Plan
from worker_client.tuning import ChunkTuner

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.flight import Flight
    from worker_client.operation import Operation
    from worker_client.settings import Settings

GRACE_S = 1.0  # after a deadline: time for a reducer to say who is missing

log = logging.getLogger(__name__)


class Finish(NamedTuple):
    """An all-reduce has ended: its buffer holds the result, or `error` says why not."""

    operation: Operation
    error: ReductionError | None


class Connect(NamedTuple):
    """Add a connection; the link that it is of counts them in order."""

    endpoint: str


Action = Send | Finish | Connect


class Session:
    """One worker's part in one job.

    Args:
        settings: who we are and where the reducers are.
        flight: class of what is in flight; whoever performs the actions also sends, after them,
            what its `refill` returns.
    """

    def __init__(self, settings: Settings, flight: type[Flight]) -> None:
        self.settings = settings
        self.links: list[Link] = []
        self._active: dict[int, Operation] = {}  # in the order of their sequence numbers
        self._deadlines: list[tuple[float, int]] = []  # a heap; may name what has ended
        self._names = Names()
        self._identity = Header(
            MessageType.HELLO,
            job=fingerprint(settings.job),
            generation=settings.generation,
            rank=settings.rank,
        )
        self.flight = flight(self._identity)
        self._tuner = ChunkTuner(settings.world_size, settings.chunk_bytes)
        weights = settings.weights or (1,) * len(settings.reducers)
        self._plan = Plan(weights, settings.chunk_bytes)
        self._flow = FlowControl(self.flight, self._tuner.chunk_bytes, settings.window_bytes > 0)
        self._question: Operation | None = None  # which the ranks are agreeing by
        self._held: list[tuple[Operation, float]] = []  # calls that wait for the answer
        for reducer, address in enumerate(settings.reducers):
            self._add_link(reducer, 0, address)
        self._handlers: dict[MessageType, Callable[[Link, Header, Buffer], list[Action]]] = {
            MessageType.WELCOME: self._welcome,
            MessageType.RESULT: self._result,
            MessageType.ERROR: self._error,
            MessageType.GOODBYE: self._goodbye,
            MessageType.PING: lambda _link, _header, _payload: [],
        }

    # -- what the client asks -----------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether every reducer has welcomed this worker."""
        return all(link.member for link in self.links)

    @property
    def refusal(self) -> ReductionError | None:
        """Why a reducer refused this worker, if one did."""
        return next((link.refusal for link in self.links if link.refusal is not None), None)

    @property
    def active(self) -> int:
        """Number of all-reduces in progress."""
        return len(self._active)

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here."""
        return self.flight.watermark

    @property
    def _limit(self) -> int:
        """Sequence number from which on nothing may be said yet."""
        return self.watermark + MAX_ROUNDS_AHEAD

    def next_deadline(self) -> float | None:
        """Time of the next `tick` that matters, in seconds of the caller's clock."""
        while self._deadlines and not self._is_due_at(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # -- events -------------------------------------------------------------------------------

    def connected(self, index: int) -> list[Action]:
        """Introduce ourselves to a reducer that the transport has reached."""
        link, s = self.links[index], self.settings
        actions = self.disconnected(index, "was connected anew") if link.up else []
        link.up = True
        link.refusal = None
        link.state = LinkState.JOINING
        body = Hello(
            job=s.job,
            world_size=s.world_size,
            reducers=len(s.reducers),
            reducer_index=link.reducer,
            chunk_bytes=s.chunk_bytes,
            lane=link.lane,
        )
        header = self._identity._replace(watermark=self.watermark, window=s.window_per_reducer())
        return [*actions, Send(index, header.pack(), encode(body))]

    def disconnected(self, index: int, reason: str) -> list[Action]:
        """Fail every all-reduce that needs a reducer which the transport has lost."""
        link = self.links[index]
        link.up = False
        link.state = LinkState.STRANGER
        actions: list[Action] = []
        for sequence in self.flight.reset(index):
            operation = self._active[sequence]
            actions += self._fail(operation, self._lost(link, reason), told_by=link)
        return actions

    def submit(self, operation: Operation, now: float) -> list[Action]:
        """Start an all-reduce; the order of calls must be the same at every rank."""
        question = self._question
        if question is not None:
            self._held.append((operation, now))
            if not question.overdue and now + operation.timeout_s < question.deadline:
                self._expect(question, now + operation.timeout_s)  # it keeps nobody waiting longer
            return []
        if self._tuner.due():
            self._held.append((operation, now))
            self._question = self._tuner.question(self._flow.rate, operation.timeout_s)
            return self._start(self._question, now)
        return self._start(operation, now)

    def _start(self, operation: Operation, now: float) -> list[Action]:
        nbytes = operation.view.nbytes
        parts = self._plan.next(nbytes)
        operation.sequence = self.flight.submit(operation, parts, self._tuner.chunk_bytes)
        self._flow.begin(nbytes, now)
        self._active[operation.sequence] = operation
        self._expect(operation, now + operation.timeout_s)
        self._names.remember(operation)
        for part in parts:
            link = self.links[part.link]
            if link.state is not LinkState.MEMBER:
                why = "is shutting down" if link.state is LinkState.DRAINING else "is not connected"
                return self._fail(operation, link.refusal or self._lost(link, why))
        return []

    def _answered(self, error: ReductionError | None) -> list[Action]:
        """Go on with what the ranks have agreed on, or with what was before."""
        self._question = None
        if error is None:
            self._tuner.answer()
            self._flow.chunk_bytes = self._tuner.chunk_bytes
            log.debug("chunks of %d bytes", self._tuner.chunk_bytes)
        (asked, *others), self._held = self._held, []
        actions = self._start(*asked)  # it was counted when it asked
        for call in others:
            actions += self.submit(*call)
        return actions

    def receive(self, index: int, frame: Buffer, payload: Buffer, now: float) -> list[Action]:
        """Take one message from a reducer."""
        done = self.flight.take(index, frame, payload, now)
        if done is not None:
            return self.completed(done, now)
        link = self.links[index]
        try:
            header = Header.unpack(frame)
            state = after(link.state, Role.REDUCER, header.type)
            if state is None:
                raise RemoteProtocolError(f"{header.type.name} is not allowed in {link.state.name}")
            actions = self._handlers[header.type](link, header, payload)
        except ReductionError as error:
            log.warning("reducer %s: %s", link.address, error)
            if not link.member:
                link.state = LinkState.STRANGER
                link.refusal = error
            return self._fail_all(error)
        link.state = state
        return actions

    def completed(self, sequences: list[int], now: float) -> list[Action]:
        """Take note that the flight has all results of these all-reduces."""
        actions: list[Action] = []
        for sequence in sequences:
            operation = self._active[sequence]
            self._flow.end(operation.view.nbytes, now)
            actions += self._finish(operation, None)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`, in seconds of the same clock as for `submit`."""
        actions: list[Action] = []
        while (due := self.next_deadline()) is not None and now >= due:
            _, sequence = heappop(self._deadlines)
            actions += self._expire(self._active[sequence], now)
        self._flow.tick(now)
        return actions

    def close(self, error: ReductionError) -> list[Action]:
        """Leave the job; whatever is in progress fails with `error`."""
        held, self._held = self._held, []
        question, self._question = self._question, None
        actions: list[Action] = []
        for operation in list(self._active.values()):
            finished = self._finish(operation, error)
            actions += [] if operation is question else finished
        actions += [Finish(operation, own(error, operation)) for operation, _ in held]
        goodbye = self._header(MessageType.GOODBYE).pack()
        for link in self.links:
            if link.member:
                link.state = LinkState.LEFT
                actions.append(Send(link.index, goodbye, None))
        return actions

    # -- messages -----------------------------------------------------------------------------

    def _welcome(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        welcome = decode(Welcome, payload)
        self._flow.admit(link.index, header.window, self._plan.share(link))
        self.flight.open(link.index)
        owed, link.owed = link.owed, {}
        actions: list[Action] = [self._abort(link, *failed) for failed in owed.items()]
        host = link.address.rpartition(":")[0]
        known = sum(other.reducer == link.reducer for other in self.links)
        for lane, port in enumerate(welcome.lanes[known - 1 :], known):
            actions.append(self._add_link(link.reducer, lane, f"{host}:{port}"))
        return actions

    def _add_link(self, reducer: int, lane: int, address: str) -> Connect:
        link = Link(len(self.links), reducer, lane, address)
        self.links.append(link)
        self.flight.add_link(self.settings.window_per_reducer())
        self._plan.use(self.links)
        return Connect(self.endpoint(link))

    def endpoint(self, link: Link) -> str:
        """Return where the transport connects: ``host:port``, or ``inproc://`` in this process."""
        return self.settings.inproc.get(link.address, link.address)

    def _result(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        """Say what is wrong with a result that the flight did not take."""
        check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        if self.flight.expects(link.index, header.sequence, header.offset):
            operation = self._active[header.sequence]
            raise RemoteProtocolError(f"the result does not fit {operation}")
        log.debug("dropped a result of all-reduce %d, which is over", header.sequence)
        return []

    def _error(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        error = self._names.restore(decode_error(payload, header.sequence))
        if isinstance(error, MismatchError) and error.field == "chunk_bytes":
            # Some rank has missed an answer. All hear of it, so all begin anew.
            self._tuner.reset()
            self._flow.chunk_bytes = self._tuner.chunk_bytes
        if link.state is LinkState.JOINING:
            link.refusal = error
        if header.sequence == NO_SEQUENCE:
            return self._fail_all(error)
        operation = self._active.get(header.sequence)
        if operation is None:
            return []
        self.flight.forget(link.index, header.sequence)
        unknown = isinstance(error, ReductionTimeout) and not error.missing
        if operation.overdue and unknown and self._waiting(header.sequence):
            return []  # this reducer does not know who is missing; another one may
        return self._fail(operation, error, told_by=link)

    def _goodbye(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del header, payload
        log.warning("reducer %s is shutting down", link.address)
        return []

    # -- ends ---------------------------------------------------------------------------------

    def _expire(self, operation: Operation, now: float) -> list[Action]:
        error = ReductionTimeout(
            f"{operation}: not done after {operation.timeout_s:g} s at rank {self.settings.rank}",
            sequence=operation.sequence,
        )
        waiting = self._waiting(operation.sequence)
        if operation.overdue or not waiting:
            return self._fail(operation, error)
        operation.overdue = True
        self._expect(operation, now + GRACE_S)
        return [self._abort(link, operation.sequence, error) for link in waiting]

    def _fail_all(self, error: ReductionError) -> list[Action]:
        actions: list[Action] = []
        for operation in list(self._active.values()):
            actions += self._fail(operation, error)
        return actions

    def _fail(
        self, operation: Operation, error: ReductionError, told_by: Link | None = None
    ) -> list[Action]:
        """End an all-reduce badly, and tell the other reducers that it cannot be finished."""
        actions = self._finish(operation, error)
        sequence = operation.sequence
        if sequence >= self._limit:
            return actions  # too far ahead for a reducer to know; our watermark tells it in time
        for link in self.links:
            if not link.member:
                link.owed = {s: e for s, e in link.owed.items() if s >= self.watermark}
                link.owed[sequence] = error
            elif link is not told_by:
                actions.append(self._abort(link, sequence, error))
        return actions

    def _finish(self, operation: Operation, error: ReductionError | None) -> list[Action]:
        del self._active[operation.sequence]
        if error is not None:
            self.flight.end(operation.sequence)
            self._flow.end(operation.view.nbytes, None)
        if operation is self._question:
            return self._answered(error)
        return [Finish(operation, own(error, operation))]

    def _expect(self, operation: Operation, deadline: float) -> None:
        operation.deadline = deadline
        heappush(self._deadlines, (deadline, operation.sequence))

    def _is_due_at(self, deadline: float, sequence: int) -> bool:
        operation = self._active.get(sequence)
        return operation is not None and operation.deadline == deadline

    def _waiting(self, sequence: int) -> list[Link]:
        """Links on which results of an all-reduce are expected."""
        return [link for link in self.links if self.flight.waits_for(link.index, sequence)]

    def _abort(self, link: Link, sequence: int, error: ReductionError) -> Send:
        header = self._header(MessageType.ABORT)._replace(sequence=sequence)
        return Send(link.index, header.pack(), encode_error(error))

    def _header(self, kind: MessageType) -> Header:
        return self._identity._replace(type=kind, watermark=self.watermark)

    def _lost(self, link: Link, why: str) -> ReducerLostError:
        return ReducerLostError(f"reducer {link.address} {why}", reducer=link.address)
