"""An averaging by quorum at one rank: the register in a store, and attempts at the reducers.

Each attempt is a job of its own, of its members alone, in which reducers sum as in any other.
`worker_client.outer.quorum` decides.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from reducer.errors import MembershipError, RankLostError, ReductionError, ReductionTimeout
from worker_client.collectives import Broadcast
from worker_client.outer.quorum import (
    Arrival,
    Attempt,
    End,
    Outcome,
    Participant,
    Propose,
    Register,
)
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from worker_client.client.client import Client
    from worker_client.work import Work

LOOK_S = 0.1  # at most, between two looks at the register
LOOKS = 100  # in a grace, at least


class Quorum(NamedTuple):
    """How the averagings of a job are decided, the same at all ranks.

    Attributes:
        client: the job's.
        store: where the registers are.
        least: ranks that an averaging needs.
        grace_s: for how long these wait for others.
        name: of this training, which no other one has at these reducers and in this store.
        steps: outer steps before its first averaging, as a register has them.
    """

    client: Client
    store: Store
    least: int
    grace_s: float
    name: str
    steps: int = 0


class Common(NamedTuple):
    """What ranks have in common of a fragment, flat tensors of float32 in host memory.

    Attributes:
        outer: the outer parameters.
        velocity: of the outer steps.
    """

    outer: torch.Tensor
    velocity: torch.Tensor


class Averaging:
    """One averaging of a fragment, on a thread of its own.

    Args:
        quorum: the job's.
        fragment: its number.
        arrival: what this rank says.
        terms: what the ranks must have in common, learning rate and momentum.
        contribution: this rank's pseudo-gradient, flat, of float32 in host memory; it is kept.
        mean: of the same size; the mean, afterwards.
        common: what this rank has, for those that are behind; nobody changes it meanwhile.
        known: as of `Participant`.
        residual: what rounding has taken away so far; it is changed if the contribution counts.
        last: whether this is the rank's last averaging.

    Attributes:
        contribution, last: as given.

    Attributes, once `wait` has returned:
        outcome: what has become of it.
        steps: outer steps that were decided before this, if the rank has the mean.
        common: what the ranks had in common then, if this rank was behind; else None.
        empty: whether no rank had learned anything.
    """

    def __init__(
        self,
        quorum: Quorum,
        fragment: int,
        arrival: Arrival,
        terms: tuple[float, ...],
        *,
        contribution: torch.Tensor,
        mean: torch.Tensor,
        common: Common,
        known: float,
        residual: torch.Tensor | None,
        last: bool,
    ) -> None:
        client = quorum.client
        self._quorum = quorum
        self._key = f"{quorum.name}/{fragment}"
        self._look_s = min(LOOK_S, quorum.grace_s / LOOKS)
        self._turn = Participant(
            client.rank,
            client.world_size,
            arrival,
            terms,
            least=quorum.least,
            grace_s=quorum.grace_s,
            timeout_s=client.timeout_s,
            known=known,
            last=last,
        )
        self.contribution = contribution
        self._mean = mean
        self._mine = common
        self._residual = residual
        self._residual_before = None if residual is None else residual.clone()
        self._attempt: Attempt | None = None
        self._channel: Client | None = None
        self._works: list[Work] = []
        self._sent: Broadcast | None = None
        self._error: Exception | None = None
        self.outcome = Outcome.FAILED
        self.steps = arrival.steps
        self.empty = False
        self.common: Common | None = None
        self.last = last
        self._thread = threading.Thread(target=self._run, name="outer step", daemon=True)
        self._thread.start()

    def wait(self) -> ReductionError | None:
        """Wait for the end; return the error, if this rank has one."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, ReductionError):
            raise self._error
        return self._error

    def _run(self) -> None:
        try:
            self._end(self._decide())
        except Exception as error:  # noqa: BLE001 (who waits gets it)
            self.outcome, self._error = Outcome.FAILED, error
        finally:
            self._leave()
            if self.outcome not in {Outcome.AVERAGED, Outcome.COUNTED}:
                self._restore_residual()

    def _decide(self) -> End:
        """Do what the decision asks for until it has ended."""
        text = self._compare_set("", Register(steps=self._quorum.steps).dump())
        while True:
            action = self._turn.look(Register.parse(text), time.monotonic())
            match action:
                case Propose(register):
                    text = self._compare_set(text, register.dump())
                    continue
                case Attempt():
                    self._begin(action)
                case End():
                    return action
                case _:
                    self._pause()
            text = self._compare_set("", "")  # which changes nothing

    def _compare_set(self, expected: str, desired: str) -> str:
        """Change the register if it is as expected; return what it is then.

        Raises:
            MembershipError: the store failed.
        """
        try:
            text = self._quorum.store.compare_set(self._key, expected, desired).decode()
        except RuntimeError as error:  # torch has no class of its own for all of them
            text, why = "", f"has failed ({error})"
        else:
            why = "is another one than before"
        if not text:
            raise MembershipError(
                f"the store in which the ranks decide on outer steps {why}: it has to outlive them"
            )
        return text

    def _begin(self, attempt: Attempt) -> None:
        """Contribute to an attempt."""
        self._leave()
        self._restore_residual()
        self._attempt, self._error = attempt, None
        torch.mul(self.contribution, attempt.weight, out=self._mean)
        timeout_s = self._quorum.grace_s
        name = f"{self._key}.{attempt.number}"
        try:
            channel = self._channel = self._quorum.client.subgroup(name, attempt.members)
            if attempt.source is not None:
                mine = torch.cat(self._mine).numpy().view(np.uint8)
                root = attempt.members.index(attempt.source)
                self._sent = Broadcast(channel, mine, root, "outer parameters, velocity")
                self._works.append(channel.all_reduce(self._sent.sent, "sum", timeout=timeout_s))
            self._works.append(
                channel.all_reduce(self._mean, "mean", timeout=timeout_s, residual=self._residual)
            )
        except ReductionError as error:
            self._fail(error)

    def _pause(self) -> None:
        """Wait for the attempt's end, for as long as the register need not be looked at."""
        if self._error is not None or not self._works:
            time.sleep(self._look_s)
            return
        try:
            for work in self._works:
                if not work.ends_within(self._look_s):
                    return
                work.wait()
            if self._sent is not None:
                self._sent.received()
        except ReductionError as error:
            self._fail(error)
        else:
            self._works = []
            self._turn.complete()

    def _fail(self, error: ReductionError) -> None:
        """Take note that the attempt has failed, and who is to blame."""
        assert self._attempt is not None
        self._error = error
        late: tuple[int, ...] = ()
        if isinstance(error, RankLostError):
            late = (error.rank,)
        elif isinstance(error, ReductionTimeout):
            late = error.missing
        self._turn.fail([self._attempt.members[rank] for rank in late])

    def _end(self, end: End) -> None:
        self.outcome = end.outcome
        if end.outcome is Outcome.AVERAGED:
            assert self._attempt is not None
            if self._attempt.steps != self.steps:
                assert self._sent is not None
                flat = torch.from_numpy(self._sent.received().view(np.float32))
                self.common = Common(*flat.chunk(2))
            self.steps, self.empty = self._attempt.steps, not self._attempt.tokens
        elif end.outcome is Outcome.LATE:
            missing = f": {_ranks(end.missing)} not come" if end.missing else ""
            self._error = ReductionTimeout(
                f"no averaging of a fragment within {self._quorum.client.timeout_s:g} s, as too "
                f"few ranks were there{missing}",
                missing=end.missing,
            )
            return
        if end.outcome is not Outcome.FAILED:
            self._error = None

    def _restore_residual(self) -> None:
        if self._residual is not None and self._residual_before is not None:
            self._residual.copy_(self._residual_before)

    def _leave(self) -> None:
        """Leave the attempt: what is in progress ends, and its memory is free."""
        channel, self._channel = self._channel, None
        works, self._works, self._sent = self._works, [], None
        if channel is not None:
            channel.shutdown()
        for work in works:
            work.ends_within(STOP_S)


def _ranks(missing: tuple[int, ...]) -> str:
    """Return which ranks have, in words."""
    if len(missing) == 1:
        return f"rank {missing[0]} has"
    return f"ranks {', '.join(map(str, missing))} have"
