"""What a session does when it loses a reducer, or all of them (sans I/O).

The rules are those of `docs/protocol.md`, section 6. A chunk is known by its all-reduce and
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
from worker_client.protocol.phase import Occurrence, Phase
from worker_client.protocol.shard_map import NEVER, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.wire.header import Header
    from worker_client.protocol.context import Context
    from worker_client.protocol.flight import Action, Carried
    from worker_client.protocol.lifecycle import Calls
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation

ADOPT_GRACE_S = 0.3  # how long to wait for one that other ranks may have gone on with
ADOPT_S = 2.0  # how long to wait at least for any reducer, when all in use are lost

log = logging.getLogger(__name__)


class Failover:
    """The losses of one worker's reducers: it goes on without them for as long as there is one.

    Attributes:
        map: which reducers are in use.
        losses: how often one that was in use was lost.
        moved: chunks that were sent again to another reducer.
        claimed: chunks whose result is here, of which another reducer was told.
        supplied: results that others needed from here.
        renewed_after: the latest all-reduce whose failure made a rank begin anew.
        closed: links whose connection is given up, and whose chunks are yet to be moved.
    """

    def __init__(self, context: Context, calls: Calls) -> None:
        self.map = context.map
        self.losses = self.moved = self.claimed = self.supplied = 0
        self.renewed_after = NEVER
        self.closed: list[Link] = []
        self._context = context
        self._spec = context.spec
        self._links = context.links
        self._flight = context.flight
        self._calls = calls
        self._aborts = calls.aborts
        self._processes: dict[int, str] = {}  # which of each reducer was lost last
        self._renewed = 0  # the epoch in which everything began anew, if it did
        self._begun = NEVER  # the question with whose answer this epoch began
        self._cause: ReductionError | None = None  # of the loss of all that were in use
        self._none_since: float | None = None  # when none of the stage was there any more, seconds
        self._waited = False  # for another reducer, as long as the job does
        self._named: int | None = None  # the reducer that the log names in the place of all

    @property
    def final(self) -> bool:
        """Whether no reducer is left, and the calls are to end by other means."""
        return self._context.phase in {Phase.HANDING_OVER, Phase.HANDED_OVER}

    def disconnected(self, link: Link, reason: str) -> list[Action]:
        """Go on without a reducer whose connection has ended."""
        if self.map.adopted is not None and not link.member:
            link.disconnect()
            return []  # it is still waited for
        asking = self._context.phase is Phase.AGREEING  # if all can use it, and we have answered
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

    def told(self, loss: Loss) -> list[Action]:
        """Go on without a reducer that another rank has lost, or begin anew as it has."""
        if loss.reducer == ALL_REDUCERS:
            return self.renew(loss.epoch, loss.sequence)
        if loss.reducer in self._spec.hosts or loss.reducer >= len(self._spec.reducers):
            return []
        stage = Stage(loss.epoch, loss.stage)
        return self.missed(loss.reducer, stage, loss.incarnation) + self.adopt()

    def missed(self, reducer: int, stage: Stage, process: str = "") -> list[Action]:
        """Go on without a reducer that some rank cannot reach, a `process` if that is known."""
        return self._lose_reducer(reducer, stage, self._missed(reducer), process)

    def welcomed(self, link: Link) -> list[Action]:
        """Record that a reducer admits us: it may be one that was waited for."""
        self._aborts.welcomed(link)
        return [*self._news(link), *self._claim_all(link), *self.adopt()]

    def adopt(self, now: float | None = None) -> list[Action]:
        """Go on with the first reducer that answers, if all in use are lost.

        `now` is given if it is time to look at the clock.
        """
        adopts = self.map.adopted is not None and not self.final
        final = self.map.final
        actions: list[Action] = []
        for link in self._links if adopts else ():
            if link.member and link.knows(self._flight.reached):  # it takes nothing more of that
                actions += self.missed(link.reducer, final, link.incarnation)
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
        busy = {link.reducer for link in self._links if adopts and self._flight.needs(link.index)}
        first = next((r for r in able if r in busy), next(iter(able), None))
        waited = self._waited_for(max(ADOPT_S, self._spec.wait_s), now)
        since = now if self._none_since is None else self._none_since
        self._none_since = since if first is None else None
        if not adopts or stage is None:
            self._cause = self._named = None
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
        """Move what a link carried, of one all-reduce or of all, to the heirs of its reducer."""
        if self.final:
            return []
        actions: list[Action] = []  # first claims on results that are here
        stuck: list[int] = []  # all-reduces that nobody is left for
        for chunk in self._flight.carried(link.index, sequence):
            heir = self.map.heir(self._links[chunk.home].reducer, chunk.number, chunk.epoch)
            if heir is None:
                stuck += [] if chunk.done else [chunk.sequence]
                continue
            most = self.map.lanes_of(heir, chunk.epoch)
            lanes = [one for one in self._links if one.reducer == heir and one.lane < most]
            to = lanes[chunk.number % len(lanes)]
            self._flight.move(chunk.sequence, chunk.offset, to.index)
            if not chunk.done:
                self.moved += 1
            elif to.member:
                actions += self._claim(chunk, to.index)
        for left in dict.fromkeys(stuck):
            if (operation := self._calls.active.get(left)) is not None:
                actions += self._calls.fail(operation, self._lost(link, "was the last one"))
        return actions

    def renew(self, epoch: int, sequence: int = NEVER) -> list[Action]:
        """Cut buffers in the first way from now on, and say so: ranks have lost touch.

        Args:
            epoch: which begins, with all reducers, if it is a later one.
            sequence: the all-reduce whose failure says so.
        """
        self.renewed_after = max(sequence, self.renewed_after)
        if epoch <= self.map.epoch:
            return []
        self._renewed = epoch
        self.map.renew(epoch)
        self._context.cut_anew(afresh=True)
        return [send for link in self._context.members for send in self._news(link)]

    def agree(self, usable_lanes: Sequence[int], sequence: int) -> list[Action]:
        """Begin a new epoch with the lanes of each reducer that every rank can use.

        `sequence` is of the question that was answered.
        """
        used = {reducer for reducer in self.map.base if self.map.uses(reducer)}
        self.map.agree(usable_lanes)
        for reducer in set(self.map.base) - used:
            log.warning("reducer %s is used again", self._spec.reducers[reducer])
        self._context.cut_anew()
        self._begun = sequence
        stage = Stage(self.map.epoch)
        missed = [
            link.reducer
            for link in self._links
            if not (link.member or link.reducer in self._spec.hosts) and self.map.uses(link.reducer)
        ]
        actions = [action for one in missed for action in self.missed(one, stage)]
        # All of them may have been lost before the answer was here.
        return actions + self._look_for_any(self._missed(self.map.base[0]))

    def supply(self, link: Link, header: Header) -> list[Send]:
        """Send a result that a reducer asks for."""
        retained = self._flight.retained(header.sequence, header.offset)
        if retained is None:
            log.debug("all-reduce %d: a result that was asked for is not kept", header.sequence)
            return []
        self.supplied += 1
        return [Send(link.index, *retained)]

    def usable_lanes(self) -> list[int]:
        """Return how many lanes of each reducer this rank could use from now on: all, or none."""
        lanes = [0] * len(self._spec.reducers)
        for link in self._links:
            lanes[link.reducer] += 1
        for link in self._links:
            lanes[link.reducer] *= link.state is LinkState.MEMBER
        return lanes

    def wanted(self) -> bool:
        """Whether this rank could use a reducer, or a lane, that buffers are not cut between."""
        adopted, lanes = self.map.adopted is not None, self.map.lanes
        return any(
            count and (adopted or count > lanes.get(reducer, 0) or not self.map.uses(reducer))
            for reducer, count in enumerate(self.usable_lanes())
            if reducer not in self._spec.hosts
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
        since = self._none_since
        return now is not None and since is not None and now >= since + seconds

    def _move_to(self, adopted: int) -> list[Action]:
        if adopted != self._named:
            self._named = adopted
            log.warning("going on with reducer %s alone", self._spec.reducers[adopted])
        return [
            self._leave(link)
            for link in self._context.members
            if link.reducer != adopted and self._flight.needs(link.index)
        ]

    def _news(self, link: Link) -> list[Action]:
        """Tell a reducer, and by it the others, what has changed while it could not be told."""
        losses = [self._loss(reducer) for reducer in self.map.lost()]
        if self._renewed:
            losses.append(Loss(ALL_REDUCERS, self._renewed, self.renewed_after))
        told = [send for loss in losses for send in self._announce([link], loss)]
        return [*told, *self._aborts.pay(link)]

    def _lose_reducer(
        self, reducer: int, stage: Stage, error: ReductionError, process: str = ""
    ) -> list[Action]:
        used = self.map.uses(reducer) and self.map.adopted is None
        actions: list[Action] = list(self._take_out(reducer, stage, self._present, process))
        if not actions:
            return []
        for action in actions:
            if isinstance(action, Reset):
                self._context.flow.dismiss(action.link)
        if used and self.map.adopted is None and self.map.stage() is not None:
            log.warning("%s: going on without it", error)
        return actions + self._look_for_any(error)

    def _look_for_any(self, error: ReductionError) -> list[Action]:
        """Find another reducer, or end the calls, with `error` perhaps, if none in use is left."""
        stage = self.map.stage()
        if stage is not None:
            if stage.number == 0 or self._cause is not None:
                return []
            self._cause = error
            log.warning("%s, the last one in use: waiting for another that answers", error)
            return self.adopt()
        if self._spec.fallback:
            self._context.occur(Occurrence.NONE_LEFT)
            for reducer in range(len(self._spec.reducers)):  # nor does any other rank use one
                self.map.lose(reducer, Stage(LAST_EPOCH))
            return [self._leave(link) for link in self._context.members]
        error, self._cause = self._none_left(self._cause or error), None
        agreement = self._calls.agreement  # it fails here as well, and that is no other reason
        failed = NEVER if agreement is None else agreement.sequence
        actions = [*self.renew(self.map.fresh(), failed), *self._calls.fail_all(error)]
        return actions + self._aborts.announce_finished(error)

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
        epoch = Stage(self.map.epoch + (self._context.phase is Phase.AGREEING))
        return max(epoch, self.map.stage() or epoch)

    def _irreplaceable(self, link: Link) -> bool:
        others = (one.reducer for one in self._context.members if one.reducer != link.reducer)
        replaced = self._spec.fallback or any(map(self.map.uses, others))
        return link.reducer in self._spec.hosts or not replaced

    def _unreachable(self, link: Link) -> ReductionError:
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

        It is lost for a stage, and for all before; for the `present` one as well, if it matters.
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
        return actions + self._announce(self._context.members, self._loss(reducer))

    def _leave(self, link: Link) -> Reset:
        """Give up a connection; what it carries is moved when it is closed."""
        link.spend(chunk.sequence for chunk in self._flight.carried(link.index))
        return self.close(link)

    def _claim_all(self, link: Link) -> list[Send]:
        """Claim the results that were moved to a link before its reducer could be told."""
        carried = self._flight.carried(link.index)
        return [send for chunk in carried if chunk.done for send in self._claim(chunk, link.index)]

    def _claim(self, chunk: Carried, to: int) -> list[Send]:
        """Tell a reducer of a chunk whose result is here."""
        retained = self._flight.retained(chunk.sequence, chunk.offset)
        if retained is None:
            return []
        self.claimed += 1
        return [Send(to, retained[0], None)]

    def _matters(self, reducer: int, epoch: int) -> bool:
        """Whether anything may be missing at some rank that a reducer carried up to an epoch."""
        return any(
            chunk.epoch <= epoch
            for link in self._links
            if link.reducer == reducer
            for chunk in self._flight.carried(link.index)
        )

    def _loss(self, reducer: int) -> Loss:
        epoch, stage = self.map.lost_for(reducer)
        return Loss(reducer, epoch, stage=stage, incarnation=self._processes.get(reducer, ""))

    def _announce(self, links: Sequence[Link], loss: Loss) -> list[Send]:
        header, payload = self._context.header(MessageType.SHARD_MAP).pack(), encode(loss)
        return [Send(link.index, header, payload) for link in links]
