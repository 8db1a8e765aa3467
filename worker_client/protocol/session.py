"""The worker's protocol logic: join, failures, deadlines, farewell (sans I/O).

Events and `now` go in, actions come out; the rules are those of `reducer/wire/README.md`. What is
healthy and frequent, contributions and results, is the flight's business.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from reducer.errors import (
    AuthError,
    MembershipError,
    MismatchError,
    ReductionError,
    ReductionTimeout,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.wire.constants import MAX_CHUNK_BYTES, NO_SEQUENCE, PLACES, MessageType
from reducer.wire.header import Buffer, Header, check_chunk, fingerprint
from reducer.wire.layout import LARGEST_CHUNK, MEASURED_BYTES
from reducer.wire.messages import ALL_REDUCERS, Loss, Stragglers, decode, decode_error, worst
from reducer.wire.states import LinkState, Role, after
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.agreement import Agreement
from worker_client.protocol.failover import Failover
from worker_client.protocol.flight import Action, Finish, HandOver, Reset, Send
from worker_client.protocol.flow_control import FlowControl
from worker_client.protocol.handover import HandingOver
from worker_client.protocol.joining import Joining, may_pass
from worker_client.protocol.lifecycle import FIRST_PLACE, Aborts, Calls, RollCall
from worker_client.protocol.operation import Unfinished
from worker_client.protocol.shard_map import Plan, ShardMap, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.wire.messages import Straggler
    from worker_client.protocol.flight import LinkShard
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

LOOK_S = 0.05  # how often to look for what is seldom due

log = logging.getLogger(__name__)


class Session:
    """One worker's part in one job.

    Args:
        spec: who we are and where the reducers are.
        flight: class of what is in flight; whoever performs the actions also sends, after them,
            what its `refill` returns.

    Attributes:
        handed_over: all calls are brought to their end by other means.
        looks_at: when `tick` is due, if no deadline is earlier, in seconds of the caller's clock.
        plan: how buffers are cut.
    """

    def __init__(self, spec: JobSpec, flight: type[CompiledFlight] = CompiledFlight) -> None:
        self.spec = spec
        self.handed_over = False
        self.links: list[Link] = []
        self.looks_at = 0.0
        self._now = 0.0  # when it last was
        self._identity = Header(
            MessageType.HELLO,
            job=fingerprint(spec.job),
            generation=spec.generation,
            rank=spec.rank,
        )
        self.flight = flight(self._identity, MEASURED_BYTES)
        self._map = ShardMap(len(spec.reducers), spec.hosts, adopts=spec.adopts)
        reducers = len(spec.reducers)
        # A card that carries contributions and results alike hardly rests, whatever their size.
        embedded = len(spec.hosts) == reducers
        chunk_bytes = spec.chunk_bytes or (LARGEST_CHUNK if embedded else 0)
        choose = spec.world_size > 1 and not chunk_bytes
        self._agreement = Agreement(choose or spec.replaceable, chunk_bytes, reducers)
        weights = spec.weights or (1,) * reducers
        chunk_bytes_of = self._agreement.chunk_bytes_of
        self.plan = Plan(weights, spec.chunk_bytes, chunk_bytes_of, self.flight)
        self._flow = FlowControl(self.flight, self._agreement.chunk_bytes, spec.window_bytes > 0)
        self._held: list[tuple[Operation, float]] = []  # calls that wait for an answer,
        self._asked_in = 0  # and the epoch in which the ranks were asked for it
        self._joining = Joining(
            spec,
            self.links,
            flight=self.flight,
            flow=self._flow,
            plan=self.plan,
            shard_map=self._map,
        )
        self._aborts = Aborts(self.links, self.flight, self._map, self._header)
        self.calls = Calls(
            spec,
            self.links,
            flight=self.flight,
            aborts=self._aborts,
            ended=self._ended,
        )
        self.failover = Failover(
            spec,
            self.links,
            self._map,
            calls=self.calls,
            flight=self.flight,
            flow=self._flow,
            aborts=self._aborts,
            header=self._header,
            cut_anew=self._cut_anew,
        )
        self._roll_call = RollCall(self.links, self._map, self.calls.active, elastic=spec.elastic)
        self._handing = HandingOver()
        self._quiet = False  # nothing is to be recovered, unless something happens
        self._handlers: dict[MessageType, Callable[[Link, Header, Buffer], list[Action]]] = {
            MessageType.CHALLENGE: self._challenge,
            MessageType.WELCOME: self._welcome,
            MessageType.RESULT: self._result,
            MessageType.ERROR: self._error,
            MessageType.GOODBYE: self._goodbye,
            MessageType.PING: self._ping,
            MessageType.SHARD_MAP: self._shard_map,
            MessageType.RETAINED: self._retained,
            MessageType.STRAGGLERS: self._stragglers,
            MessageType.CREDIT: self._credit,
        }

    # -- what the client asks -----------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether every reducer that is in use has welcomed this worker."""
        return self._joining.done

    @property
    def refusal(self) -> ReductionError | None:
        """Why a reducer refused this worker, if one did, and there is no going on without it."""
        refusals = [link.refusal for link in self.links if link.refusal is not None]
        refusals = [refusal for refusal in refusals if not may_pass(refusal)]
        if self.spec.patience_s < math.inf:
            barred = all(isinstance(link.refusal, AuthError) for link in self.links)
            final = (AuthError,) if barred else (StaleGenerationError,)
            refusals = [one for one in refusals if isinstance(one, final)]
        return next(iter(refusals), None)

    @property
    def active(self) -> int:
        """Number of all-reduces in progress."""
        return len(self.calls.active)

    @property
    def watermark(self) -> int:
        """Every all-reduce below this number is finished here."""
        return self.calls.watermark

    @property
    def lost_ranks(self) -> set[int]:
        """Ranks that a reducer in use has lost, or that have left."""
        return self._roll_call.lost

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for again and again; any thread may ask."""
        return worst([link.straggler for link in self.links if link.member])

    # -- events -------------------------------------------------------------------------------

    def connected(self, index: int, round_trip_s: float = 0.0) -> list[Action]:
        """Introduce ourselves to a reducer that the transport has reached.

        Args:
            index: of the link.
            round_trip_s: the connection's shortest, seconds; 0 if that is not known.
        """
        link = self.links[index]
        link.round_trip_s = round_trip_s
        actions = self.disconnected(index, "was connected anew") if link.up else []
        if Reset(index) in actions:
            return actions  # the connection that is there now is closed as well
        hello = self._identity._replace(watermark=self.watermark)
        return [*actions, self._joining.hello(link, hello)]

    def disconnected(self, index: int, reason: str, paused_s: float = 0.0) -> list[Action]:
        """Go on without a reducer that the transport has lost, if that can be.

        Args:
            index: of the link.
            reason: why it was lost.
            paused_s: for how long this process did not run, if that is why; else 0.
        """
        self._something_happened()
        if paused_s:
            self.calls.note_pause(paused_s)
        link = self.links[index]
        if self._joining.complete and not self.failover.final:
            return self._move_on(self.failover.disconnected(link, reason))
        link.disconnect()
        self.flight.shut(index)
        return []

    def refused(self, index: int, error: AuthError) -> list[Action]:
        """Take note that there is no connection to a reducer, for want of the right key."""
        self._something_happened()
        link = self.links[index]
        if self._joining.complete and link.refusal is None:  # else the caller hears, or has
            log.warning("%s", error)
        link.disconnect()
        self.flight.shut(index)
        self._joining.refuse(link, error, self._now)
        return []

    def submit(self, operation: Operation, now: float) -> list[Action]:
        """Start an all-reduce; the order of calls must be the same at every rank."""
        if self.flight.begin(operation, now):
            return []
        self.calls.numbering.give(operation)
        if operation.sequence < self.flight.steady_until and operation.refusal is None:
            self._begin(operation, now)
            return []
        if operation.sequence % PLACES == FIRST_PLACE:
            self._agreement.called(operation.sequence // PLACES, now)
        if self.spec.fallback and not self.handed_over:
            self._handing.asked(operation.sequence, self.flight.reached)
        actions = self._move_on(self._go_on(operation, now))
        if self._is_steady():
            due = self._agreement.next_due(operation.sequence)
            self.flight.set_steady(due, self._map.epoch)
        return actions

    def _go_on(self, operation: Operation, now: float) -> list[Action]:
        """Start what has its number, as soon as nothing stands in its way."""
        if self.handed_over:
            return [HandOver([Unfinished(operation.sequence, operation=operation)])]
        if self.calls.final is not None:
            return [Finish(operation, self.calls.final)]
        question = self.calls.question
        if self.failover.final or question is not None:
            self._held.append((operation, now))
        if question is not None:
            if not question.overdue and now + operation.timeout_s < question.deadline:
                # It keeps nobody waiting longer than the calls that wait for it.
                self.calls.active.expect(question, now + operation.timeout_s)
            return []
        if self.failover.final:
            return []
        if self._agreement.due(operation.sequence):
            self._held.append((operation, now))
            usable_lanes = self.failover.usable_lanes()
            question = self._agreement.question(self._flow.rate, usable_lanes, operation)
            self.calls.question, self._asked_in = question, self._map.epoch
            return self._start(question, now)
        return self._start(operation, now)

    def _start(self, operation: Operation, now: float) -> list[Action]:
        if operation.refusal is not None:
            return self.calls.refuse(operation, operation.refusal)
        shards = self._begin(operation, now)
        self._roll_call.begin(now)
        actions: list[Action] = []
        for shard in shards:
            link = self.links[shard.link]
            if link.state is not LinkState.MEMBER or not self._map.intact:
                actions += self.failover.route(operation, link)
        return actions

    def _begin(self, operation: Operation, now: float) -> list[LinkShard]:
        """Hand an all-reduce to the flight; return the parts that it was cut into."""
        nbytes, dtype = operation.view.nbytes, operation.dtype
        shards, chunk_bytes = self.plan.cut(nbytes, operation.sequence, dtype)
        self.flight.submit(operation, shards, chunk_bytes, self._map.epoch, now)
        if operation.name:
            self.calls.names.remember(operation)
        return shards

    def _is_steady(self) -> bool:
        """Whether a call could be begun at once, and needs no thought but whether it is due."""
        return (
            not (
                self.spec.fallback
                or self.handed_over
                or self.calls.final
                or self.calls.question
                or self.failover.final
                or self.failover.closed
                or self._agreement.wanted
                or self._roll_call.lost
            )
            and self._map.intact
            and all(link.state is LinkState.MEMBER for link in self.links)
        )

    def _something_happened(self) -> None:
        self.flight.set_steady(0.0)
        self._quiet = False
        # Also if another rank has told that the only reducer is lost that was waited for.
        self._joining.complete = self._joining.complete or self._joining.done

    def _ended(self, operation: Operation, error: ReductionError | None) -> list[Action]:
        if operation is self.calls.question:
            return self._answered(operation.sequence, error)
        return [Finish(operation, error)]

    def _answered(self, sequence: int, error: ReductionError | None) -> list[Action]:
        """Go on with what the ranks have agreed on, or with what was before."""
        self.calls.question = None
        actions: list[Action] = []
        if (final := self.calls.final) is not None:
            held, self._held = self._held, []
            return [Finish(operation, final) for operation, _ in held]
        if error is None and self._map.epoch != self._asked_in:
            log.debug("ranks have begun anew since they asked which reducers to use")
        elif error is None:
            actions += self.failover.agree(self._agreement.answer(), sequence)
            self._roll_call.agreed()
            for link in self.links:  # the next PING counts, even if it says nothing
                self.flight.set_calm(link.index, False)
            self._agreement.wanted = False  # as far as is known; it is looked at again soon
            log.debug("chunks of %d bytes", self._agreement.chunk_bytes)
        elif _declined(error):
            log.debug("a rank did not ask with the others which reducers to use")
        elif not self.failover.renewed_after(sequence):  # others may have got the answer
            actions += self.failover.renew(self._map.fresh(), sequence)
        if self.failover.final:
            return actions
        held, self._held = self._held, []
        for operation, now in held:
            actions += self._go_on(operation, now)
        return actions

    def _cut_anew(self, afresh: bool) -> None:
        """Cut buffers from now on as the agreement, if it still holds, and the shard map say."""
        if afresh:
            self._agreement.reset()
        self.plan.use(self.links, self._map.lanes)
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
            return self._move_on(self._handlers[header.type](link, header, payload))
        except ReductionError as error:
            log.warning("reducer %s: %s", link.address, error)
            if before in {LinkState.MEMBER, LinkState.DRAINING}:
                return self._move_on(self.failover.lose(link, error))
            link.state = LinkState.STRANGER
            self._joining.refuse(link, error, self._now)
            return []

    def completed(self, operations: list[Operation], now: float) -> list[Action]:
        """Take note that the flight has all results of these all-reduces."""
        actions: list[Action] = []
        for operation in operations:
            if operation.view.nbytes >= MEASURED_BYTES:
                self._flow.ended(now)
            if operation is self.calls.question:
                actions += self._answered(operation.sequence, None)
            else:
                actions.append(Finish(operation, None))
        # In a steady state there is nothing to move on from, and this is called with every result.
        if self.flight.steady_until:
            return actions
        return self._move_on(actions)

    def fail(self, error: ReductionError) -> list[Action]:
        """End badly what is in progress, and tell the reducers."""
        return self._move_on(self.calls.fail_all(error))

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`, in seconds of the same clock as for `submit`."""
        actions = self.calls.expire(now)
        if now >= self.looks_at:
            self._now, self.looks_at = now, now + LOOK_S
            actions += self._look_around(now)
        return self._move_on(actions) if actions or not self._quiet else []

    def _look_around(self, now: float) -> list[Action]:
        """Do what is seldom due."""
        self._flow.tick(now)
        actions = [] if self._quiet else self._recover(now)
        for operation in self.calls.active.straggling(now):
            operation.missing = ()  # who it was may have come since
            sequence = operation.sequence
            ask = self._header(MessageType.STRAGGLERS)._replace(sequence=sequence).pack()
            actions += [Send(one.index, ask, None) for one in self.calls.waiting(sequence)]
        for index, window in self._flow.asks(now):
            ask = self._header(MessageType.CREDIT)._replace(window=window).pack()
            if self.links[index].member:
                actions.append(Send(index, ask, None))
        return actions

    def _recover(self, now: float) -> list[Action]:
        """Do what reducers leave to do that are lost, have come back, or have yet to hear of us."""
        actions: list[Action] = [self.failover.close(link) for link in self._joining.retry(now)]
        for reducer in self._joining.give_up(now):
            actions += self.failover.missed(reducer, Stage(self._map.epoch))
        actions += self.failover.leave_drained()
        actions += self.failover.adopt(now)
        self._agreement.wanted = self.failover.wanted()
        for link in self.links:
            actions += self._aborts.pay(link)
        told = not any(link.untold for link in self.links)
        self._quiet = told and self._joining.complete and self._is_steady()
        return actions

    def close(self, error: ReductionError) -> list[Action]:
        """Leave the job; whatever is in progress fails with `error`."""
        held, self._held = self._held, []
        actions: list[Action] = []
        for operation in self.calls.active.all():
            if operation is self.calls.question:
                self.calls.leave(operation)
            else:
                actions += self.calls.drop(operation, error)
        self.calls.question = None
        actions += [Finish(operation, error) for operation, _ in held]
        goodbye = self._header(MessageType.GOODBYE).pack()
        for link in self.links:
            if link.member:
                link.state = LinkState.LEFT
                actions.append(Send(link.index, goodbye, None))
        return actions

    def endpoint(self, link: Link) -> str:
        """Return where the transport connects a link to."""
        return self._joining.endpoint(link)

    def _move_on(self, actions: list[Action]) -> list[Action]:
        """Let others have what was left with connections that these actions close, or all calls."""
        self._something_happened()
        if self.failover.closed:
            actions += self.failover.rehome_all()
        return actions + self._hand_over() if self.failover.final else actions

    def _hand_over(self) -> list[Action]:
        """Leave all calls to others, when nothing reads their buffers any more."""
        if self.handed_over:
            return []
        held, self._held = self._held, []
        waiting = {operation.sequence: operation for operation, _ in held}
        unfinished = self._handing.unfinished(self.flight, self.links, self.calls.active, waiting)
        self.handed_over = True
        self.calls.freeze()
        for operation in self.calls.active.all():
            self.calls.leave(operation)
        self.flight.confirm(self.calls.numbering.end)  # what was kept is copied
        return [HandOver(unfinished)]

    # -- messages -----------------------------------------------------------------------------

    def _challenge(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del header
        return [self._joining.prove(link, payload)]

    def _welcome(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        connects = self._joining.welcome(link, header, payload)
        actions = self.failover.welcomed(link)  # which may lose it again
        return [*actions, *connects, *self._joining.connections(link)]

    def _result(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        """Say what is wrong with a result that the flight did not take."""
        check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        if self.flight.expects(link.index, header.sequence, header.offset):
            operation = self.calls.active[header.sequence]
            raise RemoteProtocolError(f"the result does not fit {operation}")
        log.debug("dropped a result of all-reduce %d, which is over", header.sequence)
        return []

    def _error(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        error = self.calls.names.restore(decode_error(payload, header.sequence))
        if link.state is LinkState.STRANGER:
            self._joining.refuse(link, error, self._now)
            return []
        if isinstance(error, MismatchError) and error.field == "epoch":
            # Some rank has missed an answer. All hear of it, so all begin anew.
            epoch = 1 + max(map(_epoch, (error.expected, error.got)))
            renewed = Loss(ALL_REDUCERS, epoch, header.sequence)
            renewed.check_epoch()
            anew = self.failover.renew(renewed.epoch, renewed.sequence)
            return [*anew, *self._failed(link, header, error)]
        return self._failed(link, header, error)

    def _failed(self, link: Link, header: Header, error: ReductionError) -> list[Action]:
        if header.sequence == NO_SEQUENCE:
            if isinstance(error, AuthError) or not self._joining.complete:
                link.refusal = error  # what joining, or later calls, end with
            if type(error) is MembershipError or isinstance(
                error, (AuthError, RemoteProtocolError)
            ):
                return self.failover.lose(link, error)  # it does not know us, or not what we said
            return self.calls.fail_all(error)
        operation = self.calls.active.get(header.sequence)
        if operation is None:
            return []
        self.flight.forget(link.index, header.sequence)
        unknown = isinstance(error, ReductionTimeout) and not error.missing
        if operation.overdue and unknown and self.calls.waiting(header.sequence):
            return []  # this reducer does not know who is missing; another one may
        return self.calls.fail(operation, error, told_by=link)

    def _goodbye(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del header, payload
        log.warning("reducer %s is shutting down", link.address)
        return self.failover.draining(link)

    def _ping(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        self.flight.confirm(header.watermark)
        told = decode(Stragglers, payload) if payload else Stragglers(())
        self._roll_call.hear(link, told.missing, self._now)
        if told.straggler is not None and told.straggler.rank >= self.spec.world_size:
            raise RemoteProtocolError(f"the straggler, rank {told.straggler.rank}, does not exist")
        link.straggler = told.straggler
        self.flight.set_calm(link.index, not payload)
        return []

    def _credit(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del payload
        self._flow.grant(link.index, header.window)
        return []

    def _shard_map(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del link, header
        loss = decode(Loss, payload)
        loss.check_epoch()
        if loss.reducer == ALL_REDUCERS:
            return self.failover.renew(loss.epoch, loss.sequence)
        return self.failover.told(loss.reducer, Stage(loss.epoch, loss.stage), loss.incarnation)

    def _retained(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        del payload
        return list(self.failover.supply(link, header))

    def _stragglers(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        operation = self.calls.active.get(header.sequence)
        if operation is None:
            return []
        missing = decode(Stragglers, payload).missing
        error = self._roll_call.answer(operation, link, missing, self._now)
        return [] if error is None else self.calls.fail(operation, error)

    def _header(self, kind: MessageType) -> Header:
        return self._identity._replace(type=kind, watermark=self.watermark)


def _declined(error: ReductionError) -> bool:
    """Whether some ranks have gone on without a question, and all are as they were."""
    return isinstance(error, MismatchError) and error.field == "question"


def _epoch(told: object) -> int:
    """Return an epoch that an error names, which a reducer has worded."""
    if not isinstance(told, int):
        raise RemoteProtocolError(f"an epoch is a number, got {told!r:.80}")
    return told
