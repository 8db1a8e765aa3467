"""The parent's side of `torture.fault_rank`: the ranks of a job, and what they tell."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from harness import HarnessError
from harness.processes import Process
from lab.lab import Host, Lab
from torture.fault_rank import Part
from worker_client.commands.demo.ranks import free_port

JOIN_S = 50.0  # most of it is importing torch in all ranks at once
LEAVE_S = 10.0


class Step(NamedTuple):
    """An all-reduce that ended well: when, by the monotonic clock, and how long it took.

    Attributes:
        wrong: elements that are not the left fold in rank order, bit for bit.
        in_use: reducers that the rank uses then.
    """

    at: float
    seconds: float
    wrong: int
    in_use: int


class Loss(NamedTuple):
    """When a rank has taken reducers out of use, and all that are out of use since then."""

    at: float
    reducers: list[int]


class Failure(NamedTuple):
    """The error that ended a rank's part: when it was raised, and how long the call took.

    Attributes:
        error: its class.
        rank: whom it names.
        number: of the all-reduce; -1 if the rank could not join.
    """

    at: float
    seconds: float
    error: str
    text: str
    rank: int | None
    number: int


@dataclass
class Told:
    """What a rank has told of its present part.

    Attributes:
        joined: when it had joined; 0 before.
        warnings: what its client logged.
        failure: what ended the part, if anything did.
        over: whether it has left.
    """

    joined: float = 0.0
    steps: list[Step] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: Failure | None = None
    over: bool = False


class Rank(Process):
    """One rank's process.

    Attributes:
        told: of its present part.
    """

    def __init__(self, host: Host, changed: threading.Condition) -> None:
        self.host = host
        self.told = Told()
        self._changed = changed
        super().__init__(host, "-m", "torture.fault_rank", hear=self._take_note)

    def take(self, part: Part) -> None:
        """Begin a part."""
        self.told = Told()
        self.tell(json.dumps(asdict(part)))

    def _take_note(self, facts: dict[str, Any] | None) -> None:
        told, facts = self.told, facts or {"what": "over"}
        what = facts.pop("what")
        with self._changed:
            if what == "step":
                told.steps.append(Step(**facts))
            elif what == "error":
                told.failure = Failure(**facts)
            elif what == "joined":
                told.joined = facts["at"]
            elif what == "lost":
                told.losses.append(Loss(**facts))
            elif what == "warning":
                told.warnings.append(facts["text"])
            else:
                told.over = True
            self._changed.notify_all()


class Job:
    """A job whose ranks are processes on hosts of a lab, one each, generation after generation.

    Without servers the ranks host the reducers.
    """

    def __init__(self, lab: Lab, hosts: Sequence[Host], servers: Sequence[str]) -> None:
        self.generation = -1
        self._lab = lab
        self._hosts = hosts
        self._servers = tuple(servers)
        self._name = f"faults-{secrets.token_hex(4)}"
        self._changed = threading.Condition()
        self.ranks = [Rank(host, self._changed) for host in hosts]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()

    @property
    def told(self) -> list[Told]:
        """What the ranks have told of the present generation."""
        return [rank.told for rank in self.ranks]

    @property
    def done(self) -> int:
        """All-reduces of this generation that have ended well everywhere."""
        return min(len(told.steps) for told in self.told)

    def begin(self, elements: int, count: int = 0, *, pace: float = 0.0, warm: int = 0) -> None:
        """Begin the next generation, and wait until all have joined; see `Part`."""
        self.generation += 1
        leader = "" if self._servers else f"{self._hosts[0].address}:{free_port()}"
        for rank, process in enumerate(self.ranks):
            part = Part(
                rank=rank,
                world_size=len(self.ranks),
                job=self._name,
                generation=self.generation,
                servers=self._servers,
                elements=elements,
                count=count,
                leader=leader,
                pace=pace,
                warm=warm,
            )
            process.take(part)
        self.wait(lambda: all(told.joined or told.over for told in self.told), JOIN_S)
        for rank, told in enumerate(self.told):
            if not told.joined:
                words = self.ranks[rank].last_words()
                raise HarnessError(f"rank {rank} did not join: {told.failure} {words}")

    def replace(self, rank: int) -> None:
        """Start a rank's process anew."""
        self.ranks[rank].end()
        self.ranks[rank] = self.spare(rank)

    def spare(self, rank: int) -> Rank:
        """Start another process for a rank; whoever puts it into `ranks` ends the one before."""
        return Rank(self._hosts[rank], self._changed)

    def wait(self, ready: Callable[[], bool], within_s: float) -> bool:
        """Wait until something is so, as far as the ranks have told."""
        with self._changed:
            return self._changed.wait_for(ready, within_s)

    def wait_for_steps(self, count: int, within_s: float) -> bool:
        """Wait until so many all-reduces have ended well everywhere, or a part has ended."""
        return self.wait(
            lambda: self.done >= count or any(told.over for told in self.told), within_s
        )

    def wait_for_end(self, within_s: float, ranks: Sequence[int] | None = None) -> bool:
        """Wait until ranks, all if None, have ended their parts."""
        some = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        return self.wait(lambda: all(one.told.over for one in some), within_s)

    def wait_for_failure(self, within_s: float, ranks: Sequence[int]) -> bool:
        """Wait until ranks have raised their errors, or ended."""
        some = [self.ranks[rank] for rank in ranks]
        return self.wait(lambda: all(one.told.failure or one.told.over for one in some), within_s)
