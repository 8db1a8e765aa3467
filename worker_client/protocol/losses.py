"""What a session does when it loses a reducer, or all of them (sans I/O).

`Failover` knows where chunks go; here it is decided what a loss means for the calls.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reducer.errors import DuplicateRankError, RankLostError, ReducerLostError, ReductionError
from reducer.wire.states import LinkState
from worker_client.protocol.actions import Action, Reset
from worker_client.protocol.shard_map import NEVER, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from worker_client.protocol.aborts import Aborts
    from worker_client.protocol.calls import Calls
    from worker_client.protocol.failover import Failover
    from worker_client.protocol.flight import Flight
    from worker_client.protocol.flow_control import FlowControl
    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import JobSpec

ADOPT_S = 2.0  # how long to wait at least for any reducer, when all in use are lost

log = logging.getLogger(__name__)


class Losses:
    """Goes on without reducers for as long as there is one.

    Args:
        spec: who we are and where the reducers are.
        links: the session's.
        calls: what is in progress.
        failover: where chunks go.
        flight, flow: what moves them.
        aborts: tells reducers of calls that ended badly.
        renewed: called when the ranks begin anew with all reducers.

    Attributes:
        final: no reducer is left, and the calls are to end by other means.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: list[Link],
        *,
        calls: Calls,
        failover: Failover,
        flight: Flight,
        flow: FlowControl,
        aborts: Aborts,
        renewed: Callable[[], None],
    ) -> None:
        self.final = False
        self._spec = spec
        self._links = links
        self._calls = calls
        self._failover = failover
        self._map = failover.map
        self._flight = flight
        self._flow = flow
        self._aborts = aborts
        self._renewed = renewed
        self._why: ReductionError | None = None  # all are lost that were in use,
        self._since: float | None = None  # since when no reducer has been there,
        self._named: int | None = None  # and the one that the log names in their place
        self._begun = NEVER  # the question with whose answer this epoch began

    def disconnected(self, link: Link, reason: str) -> list[Action]:
        """Go on without a reducer whose connection has ended."""
        if self._map.adopted is not None and not link.member:
            link.disconnect()
            return []  # it is still waited for
        asking = self._calls.question is not None  # if all can use it, and we have answered
        used = asking or self._map.uses(link.reducer) or self._flight.needs(link.index)
        link.disconnect()
        link.unreachable = reason
        if link.reducer in self._spec.hosts:
            return self._lose_host(link, reason)
        if used:
            self._flight.shut(link.index)
            return self.lose(link, self._lost(link, reason))
        return [self._failover.close(link)]

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
            and not self._map.uses(link.reducer)
            and not self._flight.needs(link.index)
        ]
        return [self._failover.close(link) for link in drained]

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
        return [*self.news(link), *self._failover.claim(link), *self.adopt()]

    def adopt(self, now: float | None = None) -> list[Action]:
        """Go on with the first reducer that answers, if all in use are lost.

        Args:
            now: seconds of the caller's clock, if it is time to look at it.
        """
        adopts = self._map.adopted is not None and not self.final
        final = self._map.final
        actions: list[Action] = []
        for link in self._links if adopts else ():
            if link.member and link.knows(self._flight.reached):  # it takes nothing more of that
                actions += self._lose_reducer(
                    link.reducer, final, self._missed(link.reducer), link.incarnation
                )
        unreachable = {link.reducer for link in self._links if not link.member}
        there = [r for r in range(len(self._spec.reducers)) if r not in unreachable]
        if adopts and not set(there).intersection(self._map.used()):
            # One that is there was lost, but not for good: go on to the stage after that.
            lost = min((self._map.lost_for(r) for r in there), default=final)
            for reducer in self._map.used() if lost < self._last else ():
                actions += self.missed(reducer, lost)
        stage, used = self._map.stage(), self._map.used()
        able = [reducer for reducer in used if reducer in there]
        # Rather one that has a part of what is in progress: it would not take that again.
        first = next((r for r in able if adopts and self._carries(r)), next(iter(able), None))
        patience_s = max(ADOPT_S, self._spec.wait_s)
        waited = now is not None and self._since is not None and now >= self._since + patience_s
        self._since = (now if self._since is None else self._since) if first is None else None
        if not adopts or stage is None:
            self._why = self._named = None
        elif first is not None:
            for reducer in used[: used.index(first)]:  # those would be waited for
                actions += self.missed(reducer, stage)
            if self._map.adopted == first:
                actions += self._move_to(first)
        elif waited:
            for reducer in used:
                actions += self.missed(reducer, final)
        return actions

    @property
    def _last(self) -> Stage:
        """The last stage of any rank: others may have yet to begin this epoch."""
        final = self._map.final
        begun = self._flight.reached > self._begun
        return final if begun else final._replace(epoch=final.epoch - 1)

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
            self._failover.leave(link)
            for link in self._links
            if link.member and link.reducer != adopted and self._flight.needs(link.index)
        ]

    def agreed(self, missed: Iterable[int], sequence: int) -> list[Action]:
        """Take note of an agreement, and of reducers in it that this rank cannot use.

        Args:
            missed: those.
            sequence: of the question that was answered.
        """
        self._begun = sequence
        stage = Stage(self._map.epoch)
        actions = [action for one in missed for action in self.missed(one, stage)]
        # All of them may have been lost before the answer was here.
        return actions + self._look_for_any(self._missed(self._map.base[0]))

    def lose(self, link: Link, error: ReductionError) -> list[Action]:
        """Go on without the reducer at the other end of a link."""
        if link.reducer in self._spec.hosts:
            return self._calls.fail_all(error)
        return self._lose_reducer(link.reducer, self._present, error, link.incarnation)

    def route(self, operation: Operation, link: Link) -> list[Action]:
        """Find who takes what a link cannot, of an all-reduce that begins."""
        if operation.sequence not in self._calls.active:
            return []  # nobody was left for another part of it
        adopted = self._map.adopted
        if not self._map.uses(link.reducer) or adopted not in {None, link.reducer}:
            return self.rehome(link, operation.sequence)
        if link.member or adopted is not None:
            return []  # that one is waited for
        if self._irreplaceable(link) and not (self._map.adopts and link.refusal is None):
            return self._calls.fail(operation, self._none_left(self._unreachable(link)))
        return self.lose(link, self._unreachable(link))

    def rehome_all(self) -> list[Action]:
        """Move on what links carried whose connections have been given up."""
        actions: list[Action] = []
        while self._failover.closed:
            actions += self.rehome(self._failover.closed.pop(0))
        return actions

    def rehome(self, link: Link, sequence: int | None = None) -> list[Action]:
        """Move on what a link carried, of one all-reduce or of all."""
        if self.final:
            return []
        claims, stuck = self._failover.rehome(link, sequence)
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
        if not self._failover.renew(epoch, sequence):
            return []
        self._renewed()
        return [send for link in self._links if link.member for send in self.news(link)]

    def news(self, link: Link) -> list[Action]:
        """Tell a reducer, and by it the others, what has changed while it could not be told."""
        return [*self._failover.news(link), *self._aborts.pay(link)]

    def _lose_reducer(
        self, reducer: int, stage: Stage, error: ReductionError, process: str = ""
    ) -> list[Action]:
        used = self._map.uses(reducer) and self._map.adopted is None
        actions: list[Action] = list(self._failover.lose(reducer, stage, self._present, process))
        if not actions:
            return []
        for action in actions:
            if isinstance(action, Reset):
                self._flow.dismiss(action.link)
        if used and self._map.adopted is None and self._map.stage() is not None:
            log.warning("%s: going on without it", error)
        return actions + self._look_for_any(error)

    def _look_for_any(self, error: ReductionError) -> list[Action]:
        """Find another reducer, or end the calls, with `error` perhaps, if none in use is left."""
        stage = self._map.stage()
        if stage is not None:
            if stage.number == 0 or self._why is not None:
                return []
            self._why = error
            log.warning("%s, the last one in use: waiting for another that answers", error)
            return self.adopt()
        if self._spec.fallback:
            self.final = True
            return list(self._failover.give_up())
        error, self._why = self._none_left(self._why or error), None
        question = self._calls.question  # it fails here as well, and that is no other reason
        failed = NEVER if question is None else question.sequence
        actions = [*self.renew(self._map.fresh(), failed), *self._calls.fail_all(error)]
        return actions + self._aborts.tell_finished(error)

    def _lose_host(self, link: Link, reason: str) -> list[Action]:
        """Fail what needs a reducer that another rank hosts: that rank is lost as well."""
        error = self._host_lost(link, reason)
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
        epoch = Stage(self._map.epoch + (self._calls.question is not None))
        return max(epoch, self._map.stage() or epoch)

    def _irreplaceable(self, link: Link) -> bool:
        """Whether there is no way without the reducer of a link."""
        if link.reducer in self._spec.hosts:
            return True
        return not (self._spec.fallback or self._failover.others(link.reducer))

    def _unreachable(self, link: Link) -> ReductionError:
        """Say why a reducer cannot be used right now."""
        if link.refusal is not None and not isinstance(link.refusal, DuplicateRankError):
            return link.refusal  # a later generation, perhaps
        why = "is shutting down" if link.state is LinkState.DRAINING else link.unreachable
        if link.reducer in self._spec.hosts:
            return self._host_lost(link, why)
        return self._lost(link, why)

    def _host_lost(self, link: Link, why: str) -> RankLostError:
        rank = self._spec.hosts[link.reducer]
        return RankLostError(f"rank {rank}, whose reducer is {link.address}, {why}", rank=rank)

    def _none_left(self, error: ReductionError) -> ReductionError:
        """Add to the loss of a reducer what to do, as no other one is left."""
        if not isinstance(error, ReducerLostError):
            return error
        waited = f" after {self._spec.wait_s:g} s" if self._spec.wait_s else ""
        how = "longer" if self._spec.wait_s else "until one is back"
        return ReducerLostError(
            f"{error}, and no reducer is left{waited}: set REDUCTION_WAIT_FOR_REDUCERS to wait "
            f"{how}, or REDUCTION_FALLBACK=process-group to go on without one",
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
