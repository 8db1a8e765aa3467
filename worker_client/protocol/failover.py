"""What a session does when it loses a reducer, or all of them (sans I/O).

The rules are those of `reducer/wire/README.md`, section 6. A chunk is known by its all-reduce and
its offset, and its bits do not depend on who sums it. So ranks may move a chunk at different times,
and need not agree on anything but where it goes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reducer.errors import DuplicateRankError, RankLostError, ReducerLostError, ReductionError
from reducer.wire.constants import MessageType
from reducer.wire.messages import ALL_REDUCERS, LAST_EPOCH, Loss, encode
from reducer.wire.states import LinkState
from worker_client.protocol.flight import Reset, Send
from worker_client.protocol.shard_map import NEVER, ShardMap, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.wire.header import Header
    from worker_client.protocol.flight import Action, Carried, Flight
    from worker_client.protocol.flow_control import FlowControl
    from worker_client.protocol.lifecycle import Aborts, Calls
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

ADOPT_GRACE_S = 0.3  # how long to wait for one that other ranks may have gone on with
ADOPT_S = 2.0  # how long to wait at least for any reducer, when all in use are lost

log = logging.getLogger(__name__)


class Failover:
    """The losses of one worker's reducers: it goes on without them for as long as there is one.

    Args:
        spec: who we are and where the reducers are.
        links: the session's.
        shard_map: which reducers are in use.
        calls: what is in progress.
        flight, flow: what moves them.
        aborts: tells reducers of calls that ended badly.
        header: makes the header of a message.
        cut_anew: called when buffers are to be cut in another way, `afresh` if ranks lost touch.

    Attributes:
        map: as given.
        final: no reducer is left, and the calls are to end by other means.
        losses: how often one that was in use was lost.
        moved: chunks that were sent again to another reducer.
        claimed: chunks whose result is here, of which another reducer was told.
        supplied: results that others needed from here.
        closed: links whose connection is given up, and whose chunks are yet to be moved.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: Sequence[Link],
        shard_map: ShardMap,
        *,
        calls: Calls,
        flight: Flight,
        flow: FlowControl,
        aborts: Aborts,
        header: Callable[[MessageType], Header],
        cut_anew: Callable[[bool], None],
    ) -> None:
        self.map = shard_map
        self.final = False
        self.losses = self.moved = self.claimed = self.supplied = 0
        self.closed: list[Link] = []
        self._spec = spec
        self._hosts = spec.hosts
        self._reducers = len(spec.reducers)
        self._links = links
        self._calls = calls
        self._flight = flight
        self._flow = flow
        self._aborts = aborts
        self._header = header
        self._cut_anew = cut_anew
        self._processes: dict[int, str] = {}  # which of each reducer was lost last
        self._renewed = 0  # the epoch in which everything began anew, if it did
        self._renewed_after = NEVER  # the latest all-reduce whose failure made a rank begin anew
        self._waited = False  # for another reducer, as long as the job does
        self._why: ReductionError | None = None  # all are lost that were in use,
        self._since: float | None = None  # since when no reducer has been there,
        self._named: int | None = None  # and the one that the log names in their place
        self._begun = NEVER  # the question with whose answer this epoch began

    def disconnected(self, link: Link, reason: str) -> list[Action]:
        """Go on without a reducer whose connection has ended."""
        if self.map.adopted is not None and not link.member:
            link.disconnect()
            return []  # it is still waited for
        asking = self._calls.question is not None  # if all can use it, and we have answered
        used = asking or self.map.uses(link.reducer) or self._flight.needs(link.index)
        link.disconnect()
        link.unreachable = reason
        if link.reducer in self._spec.hosts:
            return self._lose_host(link, reason)
        if used:
            self._flight.shut(link.index)
            return self.lose(link, self._lost(link, reason))
        return [self.close(link)]

    def draining(self, link: Link) -> list[Action]:
        """Go on without a reducer that shuts down, if there is another way."""
        if self._irreplaceable(link):
            return []  # it goes on for as long as it may
        return self.lose(link, self._lost(link, "is shutting down"))

    def leave_drained(self) -> list[Action]:
        """Leave reducers that shut down, and are not used any more, when they have done all."""
        drained = [
            link
            for link in self._links
            if link.state is LinkState.DRAINING
            and link.reducer not in self._spec.hosts
            and not self.map.uses(link.reducer)
            and not self._flight.needs(link.index)
        ]
        return [self.close(link) for link in drained]

    def told(self, reducer: int, stage: Stage, process: str) -> list[Action]:
        """Go on without a reducer that another rank has lost, a `process` if that is known."""
        if reducer in self._spec.hosts or reducer >= len(self._spec.reducers):
            return []
        actions = self._lose_reducer(reducer, stage, self._missed(reducer), process)
        return actions + self.adopt()

    def missed(self, reducer: int, stage: Stage) -> list[Action]:
        """Go on without a reducer that some rank cannot reach."""
        return self._lose_reducer(reducer, stage, self._missed(reducer))

    def welcomed(self, link: Link) -> list[Action]:
        """Take note that a reducer admits us: it may be one that was waited for."""
        self._aborts.welcomed(link)
        return [*self._news(link), *self._claim_all(link), *self.adopt()]

    def adopt(self, now: float | None = None) -> list[Action]:
        """Go on with the first reducer that answers, if all in use are lost.

        Args:
            now: seconds of the caller's clock, if it is time to look at it.
        """
        adopts = self.map.adopted is not None and not self.final
        final = self.map.final
        actions: list[Action] = []
        for link in self._links if adopts else ():
            if link.member and link.knows(self._flight.reached):  # it takes nothing more of that
                actions += self._lose_reducer(
                    link.reducer, final, self._missed(link.reducer), link.incarnation
                )
        unreachable = {link.reducer for link in self._links if not link.member}
        there = [r for r in range(len(self._spec.reducers)) if r not in unreachable]
        nowhere = adopts and not set(there).intersection(self.map.used())
        if nowhere and self._waited_for(ADOPT_GRACE_S, now):
            # One that is there was lost, but not for good: go on to the stage after that.
            lost = min((self.map.lost_for(r) for r in there), default=final)
            for reducer in self.map.used() if lost < self._last else ():
                actions += self.missed(reducer, lost)
        stage, used = self.map.stage(), self.map.used()
        able = [reducer for reducer in used if reducer in there]
        # Rather one that has a part of what is in progress: it would not take that again.
        first = next((r for r in able if adopts and self._carries(r)), next(iter(able), None))
        waited = self._waited_for(max(ADOPT_S, self._spec.wait_s), now)
        self._since = (now if self._since is None else self._since) if first is None else None
        if not adopts or stage is None:
            self._why = self._named = None
        elif first is not None:
            for reducer in used[: used.index(first)]:  # those would be waited for
                actions += self.missed(reducer, stage)
            if self.map.adopted == first:
                actions += self._move_to(first)
        elif waited:
            self._waited = True
            for reducer in used:
                actions += self.missed(reducer, final)
        return actions

    def lose(self, link: Link, error: ReductionError) -> list[Action]:
        """Go on without the reducer at the other end of a link."""
        if link.reducer in self._spec.hosts:
            return [*self._calls.fail_all(error), self.close(link)]
        return self._lose_reducer(link.reducer, self._present, error, link.incarnation)

    def host_lost(self, link: Link, why: str) -> RankLostError:
        """Return the error that names the rank at whose reducer a link ends."""
        rank = self._spec.hosts[link.reducer]
        return RankLostError(f"rank {rank}, whose reducer is {link.address}, {why}", rank=rank)

    def route(self, operation: Operation, link: Link) -> list[Action]:
        """Find who takes what a link cannot, of an all-reduce that begins."""
        if operation.sequence not in self._calls.active:
            return []  # nobody was left for another part of it
        adopted = self.map.adopted
        if not self.map.uses(link.reducer) or adopted not in {None, link.reducer}:
            return self.rehome(link, operation.sequence)
        if link.member or adopted is not None:
            return []  # that one is waited for
        if self._irreplaceable(link) and not (self.map.adopts and link.refusal is None):
            return self._calls.fail(operation, self._none_left(self._unreachable(link)))
        return self.lose(link, self._unreachable(link))

    def rehome_all(self) -> list[Action]:
        """Move on what links carried whose connections have been given up."""
        actions: list[Action] = []
        while self.closed:
            actions += self.rehome(self.closed.pop(0))
        return actions

    def rehome(self, link: Link, sequence: int | None = None) -> list[Action]:
        """Move on what a link carried, of one all-reduce or of all."""
        if self.final:
            return []
        claims, stuck = self._rehome_chunks(link, sequence)
        actions: list[Action] = list(claims)
        for left in stuck:
            if (operation := self._calls.active.get(left)) is not None:
                actions += self._calls.fail(operation, self._lost(link, "was the last one"))
        return actions

    def renew(self, epoch: int, sequence: int = NEVER) -> list[Action]:
        """Cut buffers in the first way from now on, and say so: ranks have lost touch.

        Args:
            epoch: which begins, if it is a later one.
            sequence: the all-reduce whose failure says so.
        """
        if not self._begin_anew(epoch, sequence):
            return []
        self._cut_anew(True)
        return [send for link in self._links if link.member for send in self._news(link)]

    def agree(self, usable_lanes: Sequence[int], sequence: int) -> list[Action]:
        """Begin a new epoch with the reducers that every rank can use.

        Args:
            usable_lanes: of each reducer, as the ranks have agreed.
            sequence: of the question that was answered.
        """
        used = {reducer for reducer in self.map.base if self.map.uses(reducer)}
        self.map.agree(usable_lanes)
        for reducer in set(self.map.base) - used:
            log.warning("reducer %s is used again", self._spec.reducers[reducer])
        self._cut_anew(False)
        self._begun = sequence
        stage = Stage(self.map.epoch)
        missed = [
            link.reducer
            for link in self._links
            if self.map.uses(link.reducer) and link.reducer not in self._hosts and not link.member
        ]
        actions = [action for one in missed for action in self.missed(one, stage)]
        # All of them may have been lost before the answer was here.
        return actions + self._look_for_any(self._missed(self.map.base[0]))

    def supply(self, link: Link, header: Header) -> list[Send]:
        """Send a result that a reducer asks for."""
        kept = self._flight.kept(header.sequence, header.offset)
        if kept is None:
            log.debug("all-reduce %d: a result that was asked for is not kept", header.sequence)
            return []
        self.supplied += 1
        return [Send(link.index, *kept)]

    def renewed_after(self, sequence: int) -> bool:
        """Whether a rank has begun anew since this all-reduce, or a later one, failed there."""
        return sequence <= self._renewed_after

    def usable_lanes(self) -> list[int]:
        """Return how many lanes of each reducer this rank could use from now on: all, or none."""
        lanes, reachable = [0] * self._reducers, [True] * self._reducers
        for link in self._links:
            lanes[link.reducer] += 1
            reachable[link.reducer] &= link.state is LinkState.MEMBER
        return [count * able for count, able in zip(lanes, reachable, strict=True)]

    def wanted(self) -> bool:
        """Whether this rank could use a reducer, or a lane, that buffers are not cut between."""
        adopted, lanes = self.map.adopted is not None, self.map.lanes
        return any(
            count and (adopted or count > lanes.get(reducer, 0) or not self.map.uses(reducer))
            for reducer, count in enumerate(self.usable_lanes())
            if reducer not in self._hosts
        )

    def close(self, link: Link) -> Reset:
        """Have the connection of a link closed that nothing in progress needs."""
        link.disconnect()
        self._flight.shut(link.index)
        self.closed.append(link)
        return Reset(link.index)

    @property
    def _last(self) -> Stage:
        """The last stage of any rank: others may have yet to begin this epoch."""
        final = self.map.final
        begun = self._flight.reached > self._begun
        return final if begun else final._replace(epoch=final.epoch - 1)

    def _waited_for(self, seconds: float, now: float | None) -> bool:
        """Whether no reducer of the stage has been there for so long, if it is time to look."""
        return now is not None and self._since is not None and now >= self._since + seconds

    def _carries(self, reducer: int) -> bool:
        """Whether anything is in progress at a reducer."""
        links = (link for link in self._links if link.reducer == reducer)
        return any(self._flight.needs(link.index) for link in links)

    def _move_to(self, adopted: int) -> list[Action]:
        """Have everything go to the reducer that has taken the place of all."""
        if adopted != self._named:
            self._named = adopted
            log.warning("going on with reducer %s alone", self._spec.reducers[adopted])
        return [
            self._leave(link)
            for link in self._links
            if link.member and link.reducer != adopted and self._flight.needs(link.index)
        ]

    def _news(self, link: Link) -> list[Action]:
        """Tell a reducer, and by it the others, what has changed while it could not be told."""
        return [*self._losses_so_far(link), *self._aborts.pay(link)]

    def _lose_reducer(
        self, reducer: int, stage: Stage, error: ReductionError, process: str = ""
    ) -> list[Action]:
        used = self.map.uses(reducer) and self.map.adopted is None
        actions: list[Action] = list(self._take_out(reducer, stage, self._present, process))
        if not actions:
            return []
        for action in actions:
            if isinstance(action, Reset):
                self._flow.dismiss(action.link)
        if used and self.map.adopted is None and self.map.stage() is not None:
            log.warning("%s: going on without it", error)
        return actions + self._look_for_any(error)

    def _look_for_any(self, error: ReductionError) -> list[Action]:
        """Find another reducer, or end the calls, with `error` perhaps, if none in use is left."""
        stage = self.map.stage()
        if stage is not None:
            if stage.number == 0 or self._why is not None:
                return []
            self._why = error
            log.warning("%s, the last one in use: waiting for another that answers", error)
            return self.adopt()
        if self._spec.fallback:
            self.final = True
            return list(self._use_nothing())
        error, self._why = self._none_left(self._why or error), None
        question = self._calls.question  # it fails here as well, and that is no other reason
        failed = NEVER if question is None else question.sequence
        actions = [*self.renew(self.map.fresh(), failed), *self._calls.fail_all(error)]
        return actions + self._aborts.tell_finished(error)

    def _lose_host(self, link: Link, reason: str) -> list[Action]:
        """Fail what needs a reducer that another rank hosts: that rank is lost as well."""
        error = self.host_lost(link, reason)
        actions: list[Action] = []
        needed = self._flight.needs(link.index)
        self._flight.shut(link.index)
        for sequence in needed:
            if (operation := self._calls.active.get(sequence)) is not None:
                actions += self._calls.fail(operation, error, told_by=link)
        return actions

    @property
    def _present(self) -> Stage:
        """What a reducer is lost for that is lost now."""
        # While the ranks agree on the next, this one has perhaps told that it can use the reducer.
        epoch = Stage(self.map.epoch + (self._calls.question is not None))
        return max(epoch, self.map.stage() or epoch)

    def _irreplaceable(self, link: Link) -> bool:
        """Whether there is no way without the reducer of a link."""
        if link.reducer in self._spec.hosts:
            return True
        return not (self._spec.fallback or self._has_others(link.reducer))

    def _unreachable(self, link: Link) -> ReductionError:
        """Say why a reducer cannot be used right now."""
        if link.refusal is not None and not isinstance(link.refusal, DuplicateRankError):
            return link.refusal  # a later generation, perhaps
        why = "is shutting down" if link.state is LinkState.DRAINING else link.unreachable
        if link.reducer in self._spec.hosts:
            return self.host_lost(link, why)
        return self._lost(link, why)

    def _none_left(self, error: ReductionError) -> ReductionError:
        """Add to the loss of a reducer what to do, as no other one is left."""
        if not isinstance(error, ReducerLostError):
            return error
        wait_s, waited = self._spec.wait_s, ""
        if wait_s and self._waited:
            waited, advice = f" after {wait_s:g} s", "REDUCTION_WAIT_FOR_REDUCERS to wait longer"
        elif wait_s:  # in vain: the same process came back, and has lost what was in progress
            advice = "more REDUCTION_SERVERS"
        else:
            advice = "REDUCTION_WAIT_FOR_REDUCERS to wait until one is back"
        self._waited = False
        return ReducerLostError(
            f"{error}, and no reducer is left{waited}: set {advice}, or "
            "REDUCTION_FALLBACK=process-group to go on without one",
            reducer=error.reducer,
        )

    def _missed(self, reducer: int) -> ReducerLostError:
        address = self._spec.reducers[reducer]
        links = [link for link in self._links if link.reducer == reducer]
        why = "died, or a rank cannot reach it"
        if not any(link.incarnation or link.refusal for link in links):
            why = "has never answered this worker (check its address in REDUCTION_SERVERS)"
        return ReducerLostError(f"reducer {address} {why}", reducer=address)

    def _lost(self, link: Link, why: str) -> ReducerLostError:
        return ReducerLostError(f"reducer {link.address} {why}", reducer=link.address)

    def _take_out(
        self, reducer: int, stage: Stage, present: Stage, process: str
    ) -> list[Reset | Send]:
        """Take a reducer out of use, and tell the other ranks; nothing if that was done before.

        Args:
            reducer: its index.
            stage: for which it is lost, and for all before.
            present: for which it is out of use here from now on, if it matters.
            process: which was lost, as it called itself; "" if that is not known.
        """
        if self.map.knows(reducer, stage):
            return []
        used = self.map.uses(reducer)
        self.map.lose(reducer, stage)
        if self.map.is_past(reducer, stage) and not self._matters(reducer, stage.epoch):
            return []
        links = [link for link in self._links if link.reducer == reducer]
        # What took its place since, as another process, is there still.
        here = {link.incarnation for link in links if link.member}
        stays = self.map.adopted is not None and process and here and process not in here
        if not stays:
            self.map.lose(reducer, present)
        self._processes[reducer] = process
        # Another rank may have lost it while the ranks agreed, and say so for the next epoch.
        self.losses += used
        actions: list[Reset | Send] = [] if stays else [self._leave(link) for link in links]
        said = self._said(self._loss(reducer, self.map.lost_for(reducer)))
        return actions + [Send(link.index, *said) for link in self._links if link.member]

    def _leave(self, link: Link) -> Reset:
        """Give up a connection; what it carries is moved when it is closed."""
        link.spend(chunk.sequence for chunk in self._flight.carried(link.index))
        return self.close(link)

    def _rehome_chunks(
        self, link: Link, sequence: int | None = None
    ) -> tuple[list[Send], list[int]]:
        """Move what a link carried to the heirs of its reducer.

        Args:
            link: whose connection is closed, or whose reducer is out of use.
            sequence: one all-reduce that was not begun there; None for all.

        Returns:
            Claims on results that are here, and the all-reduces that nobody is left for.
        """
        claims: list[Send] = []
        stuck: list[int] = []
        for chunk in self._flight.carried(link.index, sequence):
            reducer = self._links[chunk.home].reducer
            heir = self.map.heir(reducer, chunk.number, chunk.epoch)
            if heir is None:
                stuck += [] if chunk.done else [chunk.sequence]
                continue
            most = self.map.lanes_of(heir, chunk.epoch)
            to_any = (other for other in self._links if other.reducer == heir)
            lanes = [other.index for other in to_any if other.lane < most]
            to = lanes[chunk.number % len(lanes)]
            self._flight.move(chunk.sequence, chunk.offset, to)
            if not chunk.done:
                self.moved += 1
            elif self._links[to].member:
                claims += self._claim(chunk, to)
        return claims, list(dict.fromkeys(stuck))

    def _claim_all(self, link: Link) -> list[Send]:
        """Claim the results that were moved to a link before its reducer could be told."""
        carried = self._flight.carried(link.index)
        return [send for chunk in carried if chunk.done for send in self._claim(chunk, link.index)]

    def _claim(self, chunk: Carried, to: int) -> list[Send]:
        """Tell a reducer of a chunk whose result is here."""
        kept = self._flight.kept(chunk.sequence, chunk.offset)
        if kept is None:
            return []
        self.claimed += 1
        return [Send(to, kept[0], None)]

    def _use_nothing(self) -> list[Reset]:
        """Use no reducer any more, nor let any other rank: all of them go another way now."""
        for reducer in range(self._reducers):
            self.map.lose(reducer, Stage(LAST_EPOCH))
        return [self._leave(link) for link in self._links if link.member]

    def _begin_anew(self, epoch: int, sequence: int) -> bool:
        """Begin anew with all reducers, as an all-reduce has failed; whether that is news."""
        self._renewed_after = max(sequence, self._renewed_after)
        if epoch <= self.map.epoch:
            return False
        self._renewed = epoch
        self.map.renew(epoch)
        return True

    def _losses_so_far(self, link: Link) -> list[Send]:
        """Return what a reducer is to be told, and the other ranks by it, when it is reached."""
        losses = [self._loss(*loss) for loss in self.map.lost().items()]
        if self._renewed:
            losses.append(Loss(ALL_REDUCERS, self._renewed, self._renewed_after))
        return [Send(link.index, *self._said(loss)) for loss in losses]

    def _has_others(self, reducer: int) -> bool:
        """Whether there is another reducer to go on with."""
        return any(
            link.member and link.reducer != reducer and self.map.uses(link.reducer)
            for link in self._links
        )

    def _matters(self, reducer: int, epoch: int) -> bool:
        """Whether anything may be missing at some rank that a reducer carried up to an epoch."""
        return any(
            chunk.epoch <= epoch
            for link in self._links
            if link.reducer == reducer
            for chunk in self._flight.carried(link.index)
        )

    def _said(self, loss: Loss) -> tuple[bytes, bytes]:
        return self._header(MessageType.SHARD_MAP).pack(), encode(loss)

    def _loss(self, reducer: int, stage: Stage) -> Loss:
        process = self._processes.get(reducer, "")
        return Loss(reducer, stage.epoch, stage=stage.number, incarnation=process)
