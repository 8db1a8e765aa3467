"""The simulated process group, which brings to their end the calls that sessions hand over."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reducer.errors import ReducerLostError
from reducer.wire.constants import PLACES
from worker_client.protocol.actions import Finish
from worker_client.protocol.handover import gaps, held, merge

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from tests.sim.processes import Worker
    from tests.sim.world import World
    from worker_client.protocol.handover import Held, Unfinished


class Group:
    """Does what `communicators.fallback` does, all at once, with the production's arithmetic.

    It checks what is handed over: that ranks number calls alike, that every result is right, and
    that together they have all that a rank has which is done with a call.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[int, dict[int, Unfinished]] = {}  # by rank and number
        self._next = 0
        self._shares: dict[int, list[Held]] | None = None  # when all ranks have come

    def take(self, worker: Worker, calls: list[Unfinished]) -> None:
        """Take a rank's calls."""
        mine = self._calls.setdefault(worker.rank, {})
        for one in calls:
            call = replace(one, number=one.number // PLACES)
            self._check(worker, call)
            mine[call.number] = call
        self.go_on()

    def _check(self, worker: Worker, call: Unfinished) -> None:
        if call.operation is not None:
            number = self._world.number_of(call.operation)
            assert number == call.number, f"rank {worker.rank} numbers {number} as {call.number}"
        else:
            failed = worker.ended[call.number] is not None
            assert call.failed == failed, f"rank {worker.rank}, call {call.number}: failed {failed}"
        right = self._world.expected(call.number)
        for offset, result in call.results.items():
            assert right[offset : offset + len(result)] == result, f"call {call.number}: wrong"

    def go_on(self) -> None:
        """Do what can be done with what all ranks have handed over, or that a rank is gone."""
        ranks = self._world.world_size
        if not all(worker.alive for worker in self._world.workers):
            self._fail()
            return
        if len(self._calls) < ranks or not all(self._calls.values()):
            return
        if self._shares is None:
            told = [[held(call) for call in self._calls[rank].values()] for rank in range(ranks)]
            self._next, self._shares = merge(told)
            for rank in range(ranks):
                late = [at for at in self._calls[rank] if at < self._next]
                calls = [self._calls[rank].pop(number) for number in late]
                assert all(call.operation is None for call in calls), f"rank {rank} lacks {late}"
        while all(self._next in self._calls[rank] for rank in range(ranks)):
            number, self._next = self._next, self._next + 1
            self._end([self._calls[rank].pop(number) for rank in range(ranks)])

    def _end(self, calls: list[Unfinished]) -> None:
        assert self._shares is not None
        number, right = calls[0].number, self._world.expected(calls[0].number)
        shares = self._shares.get(number, [])
        error: ReductionError | None = None
        if any(share.failed for share in shares):
            error = ReducerLostError("no reducer is left", reducer="")
        elif any(share.done for share in shares):
            known = {low: high for share in shares for low, high in share.chunks}
            assert gaps(known, len(right)) == [], f"nobody has all of call {number}"
        for call, worker in zip(calls, self._world.workers, strict=True):
            if call.operation is None:
                continue
            if error is None:
                self._world.outcome.fallbacks += 1
                call.operation.view[:] = right
            worker.do(partial(worker.finish, Finish(call.operation, error)))

    def _fail(self) -> None:
        """End everything: a process group does not survive the death of a rank."""
        error = ReducerLostError("no reducer is left, and a rank is gone", reducer="")
        for rank, calls in self._calls.items():
            worker = self._world.workers[rank]
            ended, self._calls[rank] = list(calls.values()), {}
            for call in ended:
                if call.operation is not None and worker.alive:
                    worker.do(partial(worker.finish, Finish(call.operation, error)))
