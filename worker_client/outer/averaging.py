"""An averaging of a fragment: of all ranks, or of those that are not late.

By quorum, each attempt is a job of its own, of its members alone, in which reducers sum as in any
other; the register is in a store, and `worker_client.outer.quorum` decides.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from reducer.errors import (
    MembershipError,
    MismatchError,
    RankLostError,
    ReductionError,
    ReductionTimeout,
)
from worker_client.collectives import Broadcast
from worker_client.outer.quorum import Attempt, End, Outcome, Participant, Propose, Register, Rules
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from worker_client.client.client import Client
    from worker_client.work import Work

LOOK_S = 0.1  # at most, between two looks at the register
LOOKS = 100  # in a grace, at least

# What ranks must say alike with their pseudo-gradients, and in words. The first byte is 1, which a
# rank that is lost does not say.
_SAID = struct.Struct("<?qqqdd")
_FIELDS = (
    ("fragment", "the fragment"),
    ("step", "the step that they are in"),
    ("steps", "the outer steps that they have made, as an averaging has failed at some of them"),
    ("lr", "the outer learning rate"),
    ("momentum", "the outer momentum"),
)


class Common(NamedTuple):
    """What ranks have in common of a fragment, flat tensors of float32 in host memory."""

    outer: torch.Tensor  # parameters
    velocity: torch.Tensor


class Averaged(NamedTuple):
    """What has become of an averaging at this rank, which has the mean if it is AVERAGED."""

    outcome: Outcome
    error: ReductionError | None = None
    steps: int = 0  # outer steps before this one, if the rank has the mean
    empty: bool = False  # whether no rank had learned anything
    tokens: float = 0.0  # that the rank has learned from, and that a mean by quorum counts
    contribution: torch.Tensor | None = None  # of the rank, if it counts and the mean never came
    common: Common | None = None  # what the ranks had in common then, if this one was behind


class AllRanks:
    """An averaging that all ranks take part in.

    Args:
        client: the job's.
        said: values of `_FIELDS`.
        gradient: this rank's pseudo-gradient, flat, of float32 in host memory; then the mean.
        residual: what rounding has taken away so far.
    """

    def __init__(
        self,
        client: Client,
        said: tuple[int, int, int, float, float],
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        self._steps = said[2]
        self._said = np.zeros((client.world_size, _SAID.size), np.uint8)
        self._said[client.rank] = np.frombuffer(_SAID.pack(True, *said), np.uint8)
        self._residual = _Residual(residual)
        told = False
        try:
            alike = client.all_reduce(self._said, "sum")
            told = True
            mean = client.all_reduce(gradient, "mean", residual=residual)
        except BaseException as error:
            if not told:  # the other ranks make both calls
                client.decline(error)
            raise
        self._works = (alike, mean)

    def wait(self) -> Averaged:
        """Wait for the end."""
        failed = [error for work in self._works if (error := _failure(work))]
        failed = failed or _differences(self._said)
        if failed:
            self._residual.restore()
            return Averaged(Outcome.FAILED, failed[0])
        return Averaged(Outcome.AVERAGED, steps=self._steps)

    def drop(self) -> None:
        """Wait for the end of what nobody will merge: what was sent for it counts as not sent."""
        self.wait()
        self._residual.restore()


class Quorum(NamedTuple):
    """How the averagings of a fragment are decided, the same at all ranks."""

    client: Client
    store: Store  # where the register is
    rules: Rules
    name: str = ""  # of the register: of this training and fragment, and no other one
    steps: int = 0  # outer steps before its first averaging, as a register has them


class ByQuorum:
    """An averaging that may end without ranks that are late, on a thread of its own.

    Args:
        quorum: how it is decided.
        participant: this rank's part in the decision.
        gradient: this rank's pseudo-gradient, flat, of float32 in host memory; then the mean.
        common: what this rank has, for those that are behind; nobody changes it meanwhile.
        residual: what rounding has taken away so far; it is changed if the contribution counts.
    """

    def __init__(
        self,
        quorum: Quorum,
        participant: Participant,
        gradient: torch.Tensor,
        common: Common,
        residual: torch.Tensor | None,
    ) -> None:
        self._quorum = quorum
        self._look_s = min(LOOK_S, quorum.rules.grace_s / LOOKS)
        self._participant = participant
        self._contribution = gradient.clone()
        self._mean = gradient
        self._common = common
        self._residual = _Residual(residual)
        self._attempt: Attempt | None = None
        self._channel: Client | None = None
        self._works: list[Work] = []
        self._sent: Broadcast | None = None
        self._error: ReductionError | None = None  # of the attempt
        self._end = Averaged(Outcome.FAILED)
        self._unexpected: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outer step", daemon=True)
        self._thread.start()

    def wait(self) -> Averaged:
        """Wait for the end."""
        self._thread.join()
        if self._unexpected is not None:
            raise self._unexpected
        return self._end

    def drop(self) -> None:
        """Wait for the end of what nobody will merge."""
        self.wait()

    def _run(self) -> None:
        try:
            self._end = self._ended(self._decide())
        except ReductionError as error:
            self._end = Averaged(Outcome.FAILED, error)
        except Exception as error:  # noqa: BLE001 (who waits gets it)
            self._unexpected = error
        finally:
            self._leave()
            if self._end.outcome not in {Outcome.AVERAGED, Outcome.COUNTED}:
                self._residual.restore()

    def _decide(self) -> End:
        text = self._compare_set("", Register(steps=self._quorum.steps).dump())
        while True:
            action = self._participant.look(Register.parse(text), time.monotonic())
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
        """Change the register if it is as expected; return what it is then."""
        try:
            text = self._quorum.store.compare_set(self._quorum.name, expected, desired).decode()
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
        self._leave()
        self._residual.restore()
        self._attempt, self._error = attempt, None
        torch.mul(self._contribution, attempt.weight, out=self._mean)
        timeout_s = self._quorum.rules.grace_s
        name = f"{self._quorum.name}.{attempt.number}"
        try:
            channel = self._channel = self._quorum.client.subgroup(name, attempt.members)
            if attempt.source is not None:
                mine = torch.cat(self._common).numpy().view(np.uint8)
                root = attempt.members.index(attempt.source)
                self._sent = Broadcast(channel, mine, root, "outer parameters, velocity")
                self._works.append(channel.all_reduce(self._sent.sent, "sum", timeout=timeout_s))
            residual = self._residual.memory
            self._works.append(
                channel.all_reduce(self._mean, "mean", timeout=timeout_s, residual=residual)
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
            self._participant.complete()

    def _fail(self, error: ReductionError) -> None:
        """Record that the attempt has failed, and who is to blame."""
        assert self._attempt is not None
        self._error = error
        late: tuple[int, ...] = ()
        if isinstance(error, RankLostError):
            late = (error.rank,)
        elif isinstance(error, ReductionTimeout):
            late = error.missing
        self._participant.fail([self._attempt.members[rank] for rank in late])

    def _ended(self, end: End) -> Averaged:
        tokens = self._participant.arrival.tokens
        match end.outcome:
            case Outcome.AVERAGED:
                assert self._attempt is not None
                steps, empty = self._attempt.steps, not self._attempt.tokens
                common: Common | None = None
                if steps != self._participant.arrival.steps:
                    assert self._sent is not None
                    flat = torch.from_numpy(self._sent.received().view(np.float32))
                    common = Common(*flat.chunk(2))
                return Averaged(end.outcome, None, steps, empty, tokens, common=common)
            case Outcome.COUNTED:
                return Averaged(end.outcome, tokens=tokens, contribution=self._contribution)
            case Outcome.LEFT_OUT:
                why = (
                    "the other ranks have made their last averaging without this one, which was "
                    "late: what it has learned since its previous one is not in their parameters"
                )
                last = self._participant.last
                return Averaged(end.outcome, ReductionTimeout(why) if last else None)
            case Outcome.LATE:
                missing = f": {_ranks(end.missing)} not come" if end.missing else ""
                why = (
                    f"no averaging of a fragment within {self._quorum.rules.timeout_s:g} s, as too "
                    f"few ranks were there{missing}"
                )
                return Averaged(end.outcome, ReductionTimeout(why, missing=end.missing))
        return Averaged(end.outcome, self._error)

    def _leave(self) -> None:
        """Leave the attempt: what is in progress ends, and its memory is free."""
        channel, self._channel = self._channel, None
        works, self._works, self._sent = self._works, [], None
        if channel is not None:
            channel.shutdown()
        for work in works:
            work.ends_within(STOP_S)


class _Residual:
    """What rounding has taken away from a rank's contributions, and had before this one."""

    def __init__(self, memory: torch.Tensor | None) -> None:
        self.memory = memory
        self._before = None if memory is None else memory.clone()

    def restore(self) -> None:
        if self.memory is not None and self._before is not None:
            self.memory.copy_(self._before)


def _failure(work: Work) -> ReductionError | None:
    """Wait for an all-reduce, and return its error."""
    try:
        work.wait()
    except ReductionError as error:
        return error
    return None


def _differences(said: np.ndarray[Any, np.dtype[np.uint8]]) -> list[ReductionError]:
    here = [(rank, _SAID.unpack(row)) for rank, row in enumerate(said)]
    here = [(rank, values) for rank, values in here if values[0]]  # but for ranks that are lost
    (first, expected), *others = here
    return [
        MismatchError.between(
            "outer step",
            field,
            (first, expected[at]),
            (rank, values[at]),
            called=f"{words} (load the state of one checkpoint at all ranks)",
        )
        for rank, values in others
        for at, (field, words) in enumerate(_FIELDS, 1)
        if values[at] != expected[at]
    ]


def _ranks(missing: tuple[int, ...]) -> str:
    """Return which ranks have, in words."""
    if len(missing) == 1:
        return f"rank {missing[0]} has"
    return f"ranks {', '.join(map(str, missing))} have"
