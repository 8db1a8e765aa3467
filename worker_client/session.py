"""The worker's protocol logic: join, failures, deadlines, farewell (sans I/O).

Events and `now` go in, actions come out; the rules are those of `reducer/wire/README.md`. What is
healthy and frequent, contributions and results, is the flight's business.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import (
    DuplicateRankError,
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import MAX_CHUNK_BYTES, NO_SEQUENCE, MessageType
from reducer.wire.header import Buffer, Header, check_chunk, fingerprint
from reducer.wire.messages import (
    ALL_REDUCERS,
    Loss,
    Stragglers,
    decode,
    decode_error,
)
from reducer.wire.states import LinkState, Role, after
from worker_client.aborts import Aborts
from worker_client.agreement import Agreement
from worker_client.failover import Failover, Reset
from worker_client.flight import Send
from worker_client.flow import FlowControl
from worker_client.joining import Connect, Joining
from worker_client.names import Names, own
from worker_client.pending import Pending
from worker_client.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.flight import Flight
    from worker_client.link import Link
    from worker_client.operation import Operation
    from worker_client.settings import Settings

LOOK_S = 0.05  # how often to look for what is seldom due
GRACE_S = 1.0  # after a deadline: time for a reducer to say who is missing

log = logging.getLogger(__name__)


class Finish(NamedTuple):
    """An all-reduce has ended: its buffer holds the result, or `error` says why not."""

    operation: Operation
    error: ReductionError | None


Action = Send | Finish | Connect | Reset


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
        self._active = Pending()
        self._now = 0.0
        self._names = Names()
        self._identity = Header(
            MessageType.HELLO,
            job=fingerprint(settings.job),
            generation=settings.generation,
            rank=settings.rank,
        )
        self.flight = flight(self._identity)
        self.failover = Failover(settings, self.links, self.flight, self._header)
        self._map = self.failover.map
        reducers = len(settings.reducers)
        choose = settings.world_size > 1 and not settings.chunk_bytes
        replaceable = any(self.failover.keeps(reducer) for reducer in range(reducers))
        self._agreement = Agreement(choose or replaceable, settings.chunk_bytes, reducers)
        weights = settings.weights or (1,) * reducers
        self._plan = Plan(weights, settings.chunk_bytes)
        self._flow = FlowControl(
            self.flight, self._agreement.chunk_bytes, settings.window_bytes > 0
        )
        self._question: Operation | None = None  # which the ranks are agreeing by
        self._held: list[tuple[Operation, float]] = []  # calls that wait for the answer
        self._joining = Joining(
            settings,
            self.links,
            flight=self.flight,
            flow=self._flow,
            plan=self._plan,
            failover=self.failover,
        )
        self._aborts = Aborts(self.links, self.flight, self._map, self._header)
        self._handlers: dict[MessageType, Callable[[Link, Header, Buffer], list[Action]]] = {
            MessageType.WELCOME: self._welcome,
            MessageType.RESULT: self._result,
            MessageType.ERROR: self._error,
            MessageType.GOODBYE: self._goodbye,
            MessageType.PING: self._ping,
            MessageType.SHARD_MAP: self._shard_map,
            MessageType.RETAINED: self._retained,
            MessageType.STRAGGLERS: self._stragglers,
        }

    # -- what the client asks -----------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether every reducer has welcomed this worker."""
        return self._joining.done

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

    def next_deadline(self) -> float | None:
        """Time of the next `tick` that matters, in seconds of the caller's clock."""
        return self._active.next_deadline()

    # -- events -------------------------------------------------------------------------------

    def connected(self, index: int) -> list[Action]:
        """Introduce ourselves to a reducer that the transport has reached."""
        link = self.links[index]
        actions = self.disconnected(index, "was connected anew") if link.up else []
        if Reset(index) in actions:
            return actions  # the connection that is there now is closed as well
        hello = self._identity._replace(watermark=self.watermark)
        return [*actions, self._joining.hello(link, hello)]

    def disconnected(self, index: int, reason: str) -> list[Action]:
        """Go on without a reducer that the transport has lost, if that can be."""
        link = self.links[index]
        asking = self._question is not None  # whether all ranks can use it, and we have answered
        used = asking or self._map.uses(link.reducer) or self.flight.needs(index)
        link.disconnect()
        if link.reducer in self.settings.hosts:
            return self._lose_host(link, reason)
        self.flight.shut(index)
        if not self._joining.complete:
            return []
        if used:
            return self._lose(link, self._lost(link, reason))
        link.close()
        return [Reset(index)]

    def released(self, index: int) -> list[Action]:
        """Move on what a closed link carried: nobody reads it from there any more."""
        link = self.links[index]
        link.closing = False
        return self._rehome(link)

    def submit(self, operation: Operation, now: float) -> list[Action]:
        """Start an all-reduce; the order of calls must be the same at every rank."""
        question = self._question
        if question is not None:
            self._held.append((operation, now))
            if not question.overdue and now + operation.timeout_s < question.deadline:
                # It keeps nobody waiting longer than the calls that wait for it.
                self._active.expect(question, now + operation.timeout_s)
            return []
        if self._agreement.due():
            self._held.append((operation, now))
            usable = self.failover.usable()
            rate, timeout_s = self._flow.rate, operation.timeout_s
            self._question = self._agreement.question(rate, usable, timeout_s)
            return self._start(self._question, now)
        return self._start(operation, now)

    def _start(self, operation: Operation, now: float) -> list[Action]:
        nbytes = operation.view.nbytes
        parts = self._plan.next(nbytes)
        chunk_bytes, epoch = self._agreement.chunk_bytes, self._map.epoch
        operation.sequence = self.flight.submit(operation, parts, chunk_bytes, epoch)
        self._flow.begin(nbytes, now)
        self._active.begin(operation, now)
        self._names.remember(operation)
        actions: list[Action] = []
        for part in parts:
            link = self.links[part.link]
            if link.state is not LinkState.MEMBER or not self._map.intact:
                actions += self._route(operation, link)
        return actions

    def _route(self, operation: Operation, link: Link) -> list[Action]:
        """Find who takes what a link cannot, of an all-reduce that begins."""
        if operation.sequence not in self._active:
            return []  # nobody was left for another part of it
        if not self._map.uses(link.reducer):
            return self._rehome(link, operation.sequence)
        if link.state is LinkState.MEMBER:
            return []
        if link.reducer in self.settings.hosts or not self.failover.others(link.reducer):
            return self._fail(operation, self._absent(link))
        return self._lose(link, self._absent(link))

    def _answered(self, error: ReductionError | None) -> list[Action]:
        """Go on with what the ranks have agreed on, or with what was before."""
        self._question = None
        actions: list[Action] = []
        if error is None:
            used = {reducer for reducer in self._map.base if self._map.uses(reducer)}
            missed = self.failover.agree(self._agreement.answer())
            for reducer in set(self._map.base) - used:
                log.warning("reducer %s is used again", self.settings.reducers[reducer])
            self._cut_anew()
            log.debug("chunks of %d bytes", self._agreement.chunk_bytes)
            for reducer in missed:
                actions += self._lose_reducer(reducer, self._map.epoch, self._unreachable(reducer))
        else:  # others may have got the answer
            actions += self._renew(self._map.fresh())
        (asked, *others), self._held = self._held, []
        actions += self._start(*asked)  # it was counted when it asked
        for call in others:
            actions += self.submit(*call)
        return actions

    def _cut_anew(self) -> None:
        """Cut buffers from now on as the agreement and the shard map say."""
        self._plan.use(self.links, self._map.base)
        self._flow.chunk_bytes = self._agreement.chunk_bytes

    def receive(self, index: int, frame: Buffer, payload: Buffer, now: float) -> list[Action]:
        """Take one message from a reducer."""
        done = self.flight.take(index, frame, payload, now)
        if done is not None:
            return self.completed(done, now)
        link = self.links[index]
        before = link.state
        try:
            header = Header.unpack(frame)
            state = after(before, Role.REDUCER, header.type)
            if state is None:
                raise RemoteProtocolError(f"{header.type.name} is not allowed in {before.name}")
            link.state = state
            return self._handlers[header.type](link, header, payload)
        except ReductionError as error:
            log.warning("reducer %s: %s", link.address, error)
            if before in {LinkState.MEMBER, LinkState.DRAINING}:
                return self._lose(link, error)
            link.state = LinkState.STRANGER
            self._joining.refuse(link, error, self._now)
            return []

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
        while (operation := self._active.expired(now)) is not None:
            actions += self._expire(operation, now)
        self._flow.tick(now)
        if now - self._now >= LOOK_S:
            self._now = now
            actions += self._look_around(now)
        return actions

    def _look_around(self, now: float) -> list[Action]:
        """Do what is seldom due."""
        actions: list[Action] = list(self._joining.retry(now))
        for link in self.links:
            actions += self._aborts.pay(link)
        if (oldest := self._active.straggling(now)) is not None:
            actions += self._ask_about(oldest)
        return actions

    def close(self, error: ReductionError) -> list[Action]:
        """Leave the job; whatever is in progress fails with `error`."""
        held, self._held = self._held, []
        question, self._question = self._question, None
        actions: list[Action] = []
        for operation in self._active.all():
            finished = self._finish(operation, error)
            actions += [] if operation is question else finished
        actions += [Finish(operation, own(error, operation)) for operation, _ in held]
        goodbye = self._header(MessageType.GOODBYE).pack()
        for link in self.links:
            if link.member:
                link.state = LinkState.LEFT
                actions.append(Send(link.index, goodbye, None))
        return actions

    def endpoint(self, link: Link) -> str:
        """Return where the transport connects a link to."""
        return self._joining.endpoint(link)

    # -- messages -----------------------------------------------------------------------------

    def _welcome(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        connects = self._joining.welcome(link, header, payload)
        return [*self._news(link), *connects]

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
        if link.state is LinkState.STRANGER:
            self._joining.refuse(link, error, self._now)
            return []
        if isinstance(error, MismatchError) and error.field == "epoch":
            # Some rank has missed an answer. All hear of it, so all begin anew.
            return [
                *self._renew(max(int(error.expected), int(error.got)) + 1),
                *self._failed(link, header, error),
            ]
        return self._failed(link, header, error)

    def _failed(self, link: Link, header: Header, error: ReductionError) -> list[Action]:
        if header.sequence == NO_SEQUENCE:
            if type(error) is MembershipError or isinstance(error, RemoteProtocolError):
                return self._lose(link, error)  # it does not know us, or not what we said
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
        if link.reducer in self.settings.hosts or not self.failover.others(link.reducer):
            return []  # it finishes what it has
        return self._lose(link, self._lost(link, "is shutting down"))

    def _ping(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del link, payload
        self.flight.confirm(header.watermark)
        return []

    def _shard_map(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del link, header
        loss = decode(Loss, payload)
        if loss.reducer == ALL_REDUCERS:
            return self._renew(loss.epoch)
        if loss.reducer in self.settings.hosts or loss.reducer >= len(self.settings.reducers):
            return []
        return self._lose_reducer(loss.reducer, loss.epoch, self._unreachable(loss.reducer))

    def _retained(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del payload
        return list(self.failover.supply(link, header))

    def _stragglers(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        operation = self._active.get(header.sequence)
        if operation is not None:
            ranks = ", ".join(map(str, decode(Stragglers, payload).missing))
            waited = self._now - operation.begun
            log.warning(
                "%s: reducer %s waits for rank %s, %.0f s so far",
                operation,
                link.address,
                ranks,
                waited,
            )
        return []

    def _ask_about(self, operation: Operation) -> list[Action]:
        header = self._header(MessageType.STRAGGLERS)._replace(sequence=operation.sequence)
        return [Send(link.index, header.pack(), None) for link in self._waiting(operation.sequence)]

    # -- reducers that are lost ---------------------------------------------------------------

    def _lose(self, link: Link, error: ReductionError) -> list[Action]:
        """Go on without the reducer at the other end of a link."""
        if link.reducer in self.settings.hosts:
            return self._fail_all(error)
        return self._lose_reducer(link.reducer, self._present, error)

    def _lose_reducer(self, reducer: int, epoch: int, error: ReductionError) -> list[Action]:
        used = self._map.uses(reducer)
        actions: list[Action] = list(self.failover.lose(reducer, epoch, self._present))
        if not actions:
            return []
        for action in actions:
            if isinstance(action, Reset):
                self._flow.dismiss(action.link)
        if not any(self._map.uses(other) for other in self._map.base):
            actions += [*self._renew(self._map.fresh()), *self._fail_all(error)]
            self._aborts.owe_finished(error)
            return actions
        if used:
            log.warning("%s: going on without it", error)
        return actions

    @property
    def _present(self) -> int:
        """The epoch for which a reducer is lost that is lost now."""
        # While the ranks agree on the next, this one has perhaps told that it can use the reducer.
        return self._map.epoch + (self._question is not None)

    def _lose_host(self, link: Link, reason: str) -> list[Action]:
        """Fail what needs a reducer that another rank hosts: that rank is lost as well."""
        rank = self.settings.hosts[link.reducer]
        error = RankLostError(f"rank {rank}, whose reducer is {link.address}, {reason}", rank=rank)
        actions: list[Action] = []
        needed = self.flight.needs(link.index)
        self.flight.shut(link.index)
        for sequence in needed:
            actions += self._fail(self._active[sequence], error, told_by=link)
        return actions

    def _rehome(self, link: Link, sequence: int | None = None) -> list[Action]:
        claims, stuck = self.failover.rehome(link, sequence)
        actions: list[Action] = list(claims)
        for left in stuck:
            if left in self._active:
                actions += self._fail(self._active[left], self._lost(link, "was the last one"))
        return actions

    def _renew(self, epoch: int) -> list[Action]:
        """Cut buffers in the first way from now on, and say so: ranks have lost touch."""
        if epoch <= self._map.epoch:
            return []
        self.failover.renew(epoch)
        self._agreement.reset()
        self._cut_anew()
        return [send for link in self.links if link.member for send in self._news(link)]

    def _news(self, link: Link) -> list[Action]:
        """Tell a reducer, and by it the others, what has changed while it could not be told."""
        return [*self.failover.news(link), *self._aborts.pay(link)]

    def _absent(self, link: Link) -> ReductionError:
        """Say why a reducer cannot be used right now."""
        if link.refusal is not None and not isinstance(link.refusal, DuplicateRankError):
            return link.refusal  # a later generation, perhaps
        draining = link.state is LinkState.DRAINING
        return self._lost(link, "is shutting down" if draining else "is not connected")

    def _unreachable(self, reducer: int) -> ReducerLostError:
        address = self.settings.reducers[reducer]
        return ReducerLostError(
            f"reducer {address} died, or a rank cannot reach it", reducer=address
        )

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
        self._active.expect(operation, now + GRACE_S)
        return [self._aborts.abort(link, operation.sequence, error) for link in waiting]

    def _fail_all(self, error: ReductionError) -> list[Action]:
        actions: list[Action] = []
        for operation in self._active.all():
            actions += self._fail(operation, error)
        return actions

    def _fail(
        self, operation: Operation, error: ReductionError, told_by: Link | None = None
    ) -> list[Action]:
        """End an all-reduce badly, and tell the other reducers that it cannot be finished."""
        actions = self._finish(operation, error)
        return [*actions, *self._aborts.tell(operation.sequence, error, told_by)]

    def _finish(self, operation: Operation, error: ReductionError | None) -> list[Action]:
        self._active.end(operation)
        if error is not None:
            self.flight.end(operation.sequence)
            self._flow.end(operation.view.nbytes, None)
        if operation is self._question:
            return self._answered(error)
        return [Finish(operation, own(error, operation))]

    def _waiting(self, sequence: int) -> list[Link]:
        """Links on which results of an all-reduce are expected."""
        return [link for link in self.links if self.flight.waits_for(link.index, sequence)]

    def _header(self, kind: MessageType) -> Header:
        return self._identity._replace(type=kind, watermark=self.watermark)

    def _lost(self, link: Link, why: str) -> ReducerLostError:
        return ReducerLostError(f"reducer {link.address} {why}", reducer=link.address)
