"""The worker's protocol logic: join, failures, deadlines, farewell (sans I/O).

Events and `now` go in, actions come out; the rules are those of `docs/protocol.md`. What is
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
from reducer.wire.header import Buffer, Header, check_chunk
from reducer.wire.layout import MEASURED_BYTES
from reducer.wire.messages import (
    ALL_REDUCERS,
    Loss,
    Stragglers,
    between_two,
    decode,
    decode_error,
    worst,
)
from reducer.wire.states import LinkState, Role, after
from worker_client.protocol import _flight
from worker_client.protocol.context import Context
from worker_client.protocol.failover import Failover
from worker_client.protocol.flight import Action, Finish, HandOver, Reset, Send
from worker_client.protocol.joining import Joining, may_pass
from worker_client.protocol.lifecycle import FIRST_PLACE, Calls, LostRankTracker
from worker_client.protocol.operation import Unfinished, refused
from worker_client.protocol.phase import Occurrence, Phase
from worker_client.protocol.shard_map import Stage

if TYPE_CHECKING:
    from reducer.wire.messages import Straggler
    from worker_client.protocol.flight import LinkShard
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

LOOK_S = 0.05  # how often to look for what is seldom due
LATEST_LOOK_S = 1.0  # after the one before, or this process has not run

log = logging.getLogger(__name__)


class Session:
    """One worker's part in one job.

    Args:
        spec: who we are and where the reducers are.
        flight: class of what is in flight; the caller performs the actions, and sends after them
            what its `refill` returns.

    Attributes:
        handed_over: all calls are brought to their end by other means.
        looks_at: when `tick` is due, if no deadline is earlier, in seconds of the caller's clock.
        plan: how buffers are cut.
        waited_for_s: by rank: how long the others have waited for it while it was the straggler.
    """

    def __init__(
        self, spec: JobSpec, flight: type[_flight.CompiledFlight] = _flight.CompiledFlight
    ) -> None:
        self._context = context = Context(spec, flight, MEASURED_BYTES)
        self.spec = spec
        self.links, self.flight, self.plan = context.links, context.flight, context.plan
        self._queued: list[tuple[Operation, float]] = []  # calls that wait for an answer,
        self._agreement_epoch = 0  # and the epoch in which the ranks were asked for it
        self._joining = Joining(context)
        self.calls = Calls(context, self._ended)
        self.failover = Failover(context, self.calls)
        self._lost_rank_tracker = LostRankTracker(context, self.calls.active)
        self.handed_over = False
        self.waited_for_s: dict[int, float] = {}
        self.looks_at = self._now = 0.0  # (`_now`: when it last looked)

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
        if self.spec.reducers_timeout_s < math.inf:
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
        return self._context.watermark

    @property
    def lost_ranks(self) -> set[int]:
        """Ranks that a reducer in use has lost, or that have left."""
        return self._lost_rank_tracker.lost

    @property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for again and again; any thread may ask."""
        told = [link.straggler for link in self.links if link.member]
        found = worst(told)
        of_two = self.spec.world_size == 2 and len(self.spec.hosts) == len(self.spec.reducers)
        return between_two(found, told) if found and of_two else found

    @property
    def network_links(self) -> list[Link]:
        """All links but those to the reducer of this process."""
        return [link for link in self.links if link.address not in self.spec.inproc]

    @property
    def carries(self) -> float:
        """What links to other machines carry, bytes per second; 0 if not known. Any thread may."""
        return self._context.flow.carries

    # -- events -------------------------------------------------------------------------------

    def connected(self, index: int, round_trip_s: float = 0.0) -> list[Action]:
        """Introduce ourselves to a reducer that the transport has reached.

        `round_trip_s` is the connection's shortest; 0 if that is not known.
        """
        link = self.links[index]
        link.round_trip_s = round_trip_s
        actions = self.disconnected(index, "was connected anew") if link.up else []
        if Reset(index) in actions:
            return actions  # the connection that is there now is closed as well
        return [*actions, self._joining.hello(link, self._context.header(MessageType.HELLO))]

    def disconnected(self, index: int, reason: str, paused_s: float = 0.0) -> list[Action]:
        """Go on without a reducer that the transport has lost, if that can be.

        `paused_s` is for how long this process did not run, if that is the reason; else 0.
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
        """Record that there is no connection to a reducer, for want of the right key."""
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
        if operation.leaves is not None and self.flight.lacks_leaves:
            why = "a reducer of this job cannot sum leaves: install this version there as well"
            operation.refusal = operation.refusal or refused(self.spec.rank, why)
        self.calls.numbering.give(operation)
        if operation.sequence < self.flight.fast_path_limit and operation.refusal is None:
            self._begin(operation, now)
            return []
        agreement = self._context.agreement
        if operation.sequence % PLACES == FIRST_PLACE:
            agreement.called(operation.sequence // PLACES, now)
        if self.spec.fallback and not self.handed_over:
            self.calls.may_be_handed_over(operation.sequence)
        actions = self._move_on(self._go_on(operation, now))
        if self._may_take_fast_path():
            due = agreement.next_due(operation.sequence)
            self.flight.set_steady(due, self._context.map.epoch)
        return actions

    def _go_on(self, operation: Operation, now: float) -> list[Action]:
        """Start what has its number, as soon as nothing stands in its way."""
        context, calls = self._context, self.calls
        if context.phase is Phase.HANDED_OVER:
            return [HandOver([Unfinished(operation.sequence, operation=operation)])]
        if context.phase is Phase.GOING_ON_ELSEWHERE:
            return [Finish(operation, calls.final)]
        if context.phase in {Phase.AGREEING, Phase.HANDING_OVER}:
            self._queued.append((operation, now))
            agreement, deadline = calls.agreement, now + operation.timeout_s
            if agreement is not None and not agreement.overdue and deadline < agreement.deadline:
                # Its deadline is no later than those of the calls that wait for it.
                calls.active.expect(agreement, deadline)
            return []
        if not context.agreement.due(operation.sequence):
            return self._start(operation, now)
        self._queued.append((operation, now))
        usable_lanes = self.failover.usable_lanes()
        calls.agreement = context.agreement.begin_round(context.flow.rate, usable_lanes, operation)
        self._agreement_epoch = context.map.epoch
        context.occur(Occurrence.ASKED)
        return self._start(calls.agreement, now)

    def _start(self, operation: Operation, now: float) -> list[Action]:
        if operation.refusal is not None:
            return self.calls.refuse(operation, operation.refusal)
        shards = self._begin(operation, now)
        self._lost_rank_tracker.begin(now)
        actions: list[Action] = []
        for shard in shards:
            link = self.links[shard.link]
            if link.state is not LinkState.MEMBER or not self._context.map.intact:
                actions += self.failover.route(operation, link)
        return actions

    def _begin(self, operation: Operation, now: float) -> list[LinkShard]:
        """Hand an all-reduce to the flight; return the parts that it was cut into."""
        nbytes, dtype = operation.nbytes, operation.dtype
        shards, chunk_bytes = self.plan.cut(nbytes, operation.sequence, dtype)
        if operation.leaves is not None:
            chunk_bytes = operation.leaves.chunk_bytes(chunk_bytes)
        self.flight.submit(operation, shards, chunk_bytes, self._context.map.epoch, now)
        if operation.name:
            self.calls.names.remember(operation)
        return shards

    def _may_take_fast_path(self) -> bool:
        """Whether a call could be begun at once, and needs no thought but whether it is due."""
        context = self._context
        return (
            context.phase in {Phase.RECOVERING, Phase.STEADY}
            and not (self.spec.fallback or context.agreement.wanted or self._lost_rank_tracker.lost)
            and context.map.intact
            and all(link.state is LinkState.MEMBER for link in self.links)
        )

    def _something_happened(self) -> None:
        self.flight.set_steady(0.0)
        self._context.occur(Occurrence.EVENT)
        # Another rank may have told that the only reducer is lost that was waited for.
        self._joining.complete_if_done()

    def _ended(self, operation: Operation, error: ReductionError | None) -> list[Action]:
        if operation is self.calls.agreement:
            return self._answered(operation.sequence, error)
        return [Finish(operation, error)]

    def _answered(self, sequence: int, error: ReductionError | None) -> list[Action]:
        """Go on with what the ranks have agreed on, or with what was before."""
        self.calls.agreement = None
        self._context.occur(Occurrence.ANSWERED)
        actions: list[Action] = []
        if self._context.phase is Phase.RECOVERING:  # else what is held fails
            actions += self._conclude(sequence, error)
        if self.failover.final:
            return actions
        queued, self._queued = self._queued, []
        for operation, now in queued:
            actions += self._go_on(operation, now)
        return actions

    def _conclude(self, sequence: int, error: ReductionError | None) -> list[Action]:
        context = self._context
        if error is None and context.map.epoch != self._agreement_epoch:
            log.debug("ranks have begun anew since they asked which reducers to use")
        elif error is None:
            actions = self.failover.agree(context.agreement.answer(), sequence)
            self._lost_rank_tracker.agreed()
            for link in self.links:  # the next PING counts, even if it says nothing
                self.flight.suppress_pings(link.index, False)
            context.agreement.wanted = False  # as far as is known; it is looked at again soon
            log.debug("chunks of %d bytes", context.agreement.chunk_bytes)
            return actions
        elif _declined(error):
            log.debug("a rank did not ask with the others which reducers to use")
        elif sequence > self.failover.renewed_after:  # else others may have got the answer
            return self.failover.renew(context.map.fresh(), sequence)
        return []

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
            return self._move_on(self._take(link, header, payload))
        except ReductionError as error:
            log.warning("reducer %s: %s", link.address, error)
            if before in {LinkState.MEMBER, LinkState.DRAINING}:
                return self._move_on(self.failover.lose(link, error))
            link.state = LinkState.NOT_JOINED
            self._joining.refuse(link, error, self._now)
            return []

    def completed(self, operations: list[Operation], now: float) -> list[Action]:
        """Record that the flight has all results of these all-reduces."""
        actions: list[Action] = []
        for operation in operations:
            if operation.nbytes >= MEASURED_BYTES:
                self._context.flow.ended(now)
            if operation is self.calls.agreement:
                actions += self._answered(operation.sequence, None)
            else:
                actions.append(Finish(operation, None))
        # In a steady state there is nothing to move on from, and this is called with every result.
        if self.flight.fast_path_limit:
            return actions
        return self._move_on(actions)

    def fail(self, error: ReductionError) -> list[Action]:
        """End badly what is in progress, and tell the reducers."""
        return self._move_on(self.calls.fail_all(error))

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`, in seconds of the same clock as for `submit`."""
        actions = self.calls.expire(now)
        if now >= self.looks_at:
            self._note_straggler(min(now - self._now, LATEST_LOOK_S))
            self._now, self.looks_at = now, now + LOOK_S
            actions += self._look_around(now)
        recovers = self._context.phase is not Phase.STEADY
        return self._move_on(actions) if actions or recovers else []

    def _look_around(self, now: float) -> list[Action]:
        """Do what is seldom due."""
        context = self._context
        context.flow.tick(now)
        actions = [] if context.phase is Phase.STEADY else self._recover(now)
        for operation in self.calls.active.straggling(now):
            operation.missing = ()  # who it was may have come since
            sequence = operation.sequence
            ask = context.header(MessageType.STRAGGLERS, sequence=sequence).pack()
            actions += [Send(one.index, ask, None) for one in self.calls.waiting(sequence)]
        for index, window in context.flow.asks(now):
            ask = context.header(MessageType.CREDIT, window=window).pack()
            if self.links[index].member:
                actions.append(Send(index, ask, None))
        return actions

    def _note_straggler(self, elapsed_s: float) -> None:
        if (late := self.straggler) is not None:
            waited_s = self.waited_for_s.get(late.rank, 0.0) + late.share * elapsed_s
            self.waited_for_s[late.rank] = waited_s

    def _recover(self, now: float) -> list[Action]:
        """Do what reducers leave to do that are lost, have come back, or have yet to hear of us."""
        actions: list[Action] = [self.failover.close(link) for link in self._joining.retry(now)]
        for reducer in self._joining.give_up(now):
            actions += self.failover.missed(reducer, Stage(self._context.map.epoch))
        actions += self.failover.leave_drained()
        actions += self.failover.adopt(now)
        self._context.agreement.wanted = self.failover.wanted()
        for link in self.links:
            actions += self.calls.aborts.pay(link)
        if self._may_take_fast_path() and not any(link.untold for link in self.links):
            self._context.occur(Occurrence.RECOVERED)
        return actions

    def close(self, error: ReductionError) -> list[Action]:
        """Leave the job; whatever is in progress fails with `error`."""
        queued, self._queued = self._queued, []
        actions: list[Action] = []
        for operation in self.calls.active.all():
            if operation is self.calls.agreement:
                self.calls.leave(operation)
            else:
                actions += self.calls.drop(operation, error)
        self.calls.agreement = None
        actions += [Finish(operation, error) for operation, _ in queued]
        goodbye = self._context.header(MessageType.GOODBYE).pack()
        for link in self._context.members:
            link.state = LinkState.LEFT
            actions.append(Send(link.index, goodbye, None))
        self._context.occur(Occurrence.LEFT)
        return actions

    def endpoint(self, link: Link) -> str:
        """Return where the transport connects a link to."""
        return self._joining.endpoint(link)

    def _move_on(self, actions: list[Action]) -> list[Action]:
        """Let others have what was left with connections that these actions close, or all calls."""
        self._something_happened()
        actions += self.failover.rehome_all()
        if self._context.phase is Phase.HANDING_OVER:
            queued, self._queued = self._queued, []
            self.handed_over = True
            self._context.occur(Occurrence.GIVEN)
            unfinished = self.calls.hand_over(operation for operation, _ in queued)
            actions.append(HandOver(unfinished))
        return actions

    # -- messages -----------------------------------------------------------------------------

    def _take(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        actions: list[Action] = []
        match header.type:
            case MessageType.CHALLENGE:
                actions.append(self._joining.prove(link, payload))
            case MessageType.WELCOME:
                connects = self._joining.welcome(link, header, payload)
                actions += self.failover.welcomed(link)  # which may lose it again
                actions += [*connects, *self._joining.connections(link)]
            case MessageType.RESULT:
                self._result(link, header, payload)
            case MessageType.ERROR:
                actions += self._error(link, header, payload)
            case MessageType.GOODBYE:
                log.warning("reducer %s is shutting down", link.address)
                actions += self.failover.draining(link)
            case MessageType.PING:
                self._ping(link, header, payload)
            case MessageType.SHARD_MAP:
                loss = decode(Loss, payload)
                loss.check_epoch()
                actions += self.failover.told(loss)
            case MessageType.RETAINED:
                actions += self.failover.supply(link, header)
            case MessageType.STRAGGLERS:
                actions += self._stragglers(link, header, payload)
            case MessageType.CREDIT:
                self._context.flow.raise_limit(link.index, header.window)
        return actions

    def _result(self, link: Link, header: Header, payload: Buffer) -> None:
        """Say what is wrong with a result that the flight did not take."""
        check_chunk(header, len(payload), MAX_CHUNK_BYTES)
        if self.flight.expects(link.index, header.sequence, header.offset):
            operation = self.calls.active[header.sequence]
            raise RemoteProtocolError(f"the result does not fit {operation}")
        log.debug("dropped a result of all-reduce %d, which is over", header.sequence)

    def _error(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        error = self.calls.names.restore(decode_error(payload, header.sequence))
        if link.state is LinkState.NOT_JOINED:
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

    def _ping(self, link: Link, header: Header, payload: Buffer) -> None:
        self.flight.confirm(header.watermark)
        told = decode(Stragglers, payload) if payload else Stragglers(())
        self._lost_rank_tracker.record(link, told.missing, self._now)
        if told.straggler is not None and told.straggler.rank >= self.spec.world_size:
            raise RemoteProtocolError(f"the straggler, rank {told.straggler.rank}, does not exist")
        link.straggler = told.straggler
        self.flight.suppress_pings(link.index, not payload)

    def _stragglers(self, link: Link, header: Header, payload: Buffer) -> list[Action]:
        operation = self.calls.active.get(header.sequence)
        if operation is None:
            return []
        missing = decode(Stragglers, payload).missing
        error = self._lost_rank_tracker.answer(operation, link, missing, self._now)
        return [] if error is None else self.calls.fail(operation, error)


def _declined(error: ReductionError) -> bool:
    """Whether some ranks have gone on without a question, and all are as they were."""
    return isinstance(error, MismatchError) and error.field == "question"


def _epoch(told: object) -> int:
    """Return an epoch that an error names, which a reducer has worded."""
    if not isinstance(told, int):
        raise RemoteProtocolError(f"an epoch is a number, got {told!r:.80}")
    return told
