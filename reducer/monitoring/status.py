"""What a reducer says about itself, as records and as JSON: no secrets, and bounded in size."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from reducer.engine.lateness import RankWaits  # noqa: TC001 (pydantic reads it)
from reducer.engine.traffic import NO_TRAFFIC, Traffic
from reducer.errors import RemoteProtocolError
from reducer.wire.messages import Straggler  # noqa: TC001 (pydantic reads it)

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_JOBS = 256  # that are told one by one
MAX_RANKS = 8  # of a job
MAX_RANGES = 64  # of ranks; 64 gaps say enough about a job
MAX_HOSTS = 1024  # of all jobs
OCTAVES = range(6, 26)  # of microseconds: from 64 us to 34 s

State: TypeAlias = Literal["starting", "serving", "draining", "failing"]
_INSIDE = Field(exclude=True)  # is not told in JSON
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Memory:
    """A part of a reducer's memory, in bytes.

    Attributes:
        limit: what all jobs together may reserve.
        reserved: what is set aside for the jobs that are here.
        held: what contributions take that wait for those of other ranks.
    """

    limit: int
    reserved: int
    held: int


@dataclass(frozen=True)
class RankStatus:
    """How long the others have waited for one rank alone since the job began.

    Attributes:
        late_waits, slow_waits: how often, because it came late, and because its contributions took
            longer than those of the others (`reducer.engine.lateness`).
        late_s, slow_s: how long, seconds; of all threads together.
        late_buckets, slow_buckets: how many of these waits lasted for less than 1, 2, 4 ... 4096
            ms, and for longer.
    """

    rank: int
    late_waits: int
    late_s: float
    late_buckets: tuple[int, ...]
    slow_waits: int
    slow_s: float
    slow_buckets: tuple[int, ...]


@dataclass(frozen=True)
class JobTraffic:
    """What the all-reduces of a job have moved here since it began, and how long they took.

    An all-reduce takes from its first contribution until its result (`reducer.engine.traffic`).

    Attributes:
        bytes_in, bytes_out: of contributions, and of results to all ranks.
        all_reduces: how many are over; as that thread has it that has most.
        seconds: how long they took together; each thread has its part of an all-reduce.
        buckets: how many of these parts took less than 64, 128 ... us, the last one less than 34 s,
            and how many there are.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    all_reduces: int = 0
    seconds: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(OCTAVES) + 1)

    @classmethod
    def of(cls, traffic: Traffic) -> JobTraffic:
        """Return what is told of what was counted."""
        buckets = *(traffic.within(octave) for octave in OCTAVES), sum(traffic.buckets.values())
        bytes_in, bytes_out, all_reduces, us, _ = traffic
        return cls(bytes_in, bytes_out, all_reduces, us / 1e6, buckets)


@dataclass(frozen=True)
class Lately:
    """What the all-reduces of a job did here in the last minute.

    Attributes:
        seconds: how long that was: less if the job is younger, or nobody has asked before.
        bytes_in, bytes_out, all_reduces: as in `JobTraffic`, during that time.
        median_s, p99_s: within which half of them, and 99 of 100, were over; 0 if there was none.
    """

    seconds: float
    bytes_in: int
    bytes_out: int
    all_reduces: int
    median_s: float
    p99_s: float


@dataclass(frozen=True)
class JobStatus:
    """One generation of one job, as one thread knows it or all together.

    Attributes:
        ranks_present, ranks_absent: such as ``0-3,7``; the latter have not come, or have gone.
        reserved, held: bytes, as of `Memory`.
        rounds: all-reduces in progress, or failed and not yet forgotten.
        costliest_ranks: the `MAX_RANKS` for which the others have waited most since it began.
        straggler: the one that they wait for again and again, if there is one.
        traffic: since it began.
        lately: the same of the last minute; None when nobody has asked before.
        hosts: of those that are present, by name: such as ``0-3,7``, for as many as are told.
        ranks: those that are present.
        waits: of more ranks than the costliest.
        moved: what `traffic` is made of.
        threads: how many know it.
        host_names: of the ranks that are present, where they have said it.
    """

    name: str
    generation: int
    world_size: int
    present: int
    ranks_present: str
    ranks_absent: str
    reserved: int
    held: int
    rounds: int
    costliest_ranks: tuple[RankStatus, ...] = ()  # an earlier version does not tell, nor the next
    straggler: Straggler | None = None
    traffic: JobTraffic = JobTraffic()  # an earlier version does not tell, nor the next two
    lately: Lately | None = None
    hosts: dict[str, str] = field(default_factory=dict)
    ranks: Annotated[frozenset[int], _INSIDE] = frozenset()
    waits: Annotated[tuple[RankWaits, ...], _INSIDE] = ()
    moved: Annotated[Traffic, _INSIDE] = NO_TRAFFIC
    threads: Annotated[int, _INSIDE] = 1
    host_names: Annotated[dict[int, str], _INSIDE] = field(default_factory=dict)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" if that is not told."""
        here = (host for host, said in self.hosts.items() if _has(said, rank))
        return next(here, "")


@dataclass(frozen=True)
class LaneStatus:
    """One thread that serves.

    Attributes:
        answers: whether it took a look at its state when it was asked; if not, all else is 0.
        members: ranks of all jobs that are connected to it.
        counters: what it has done since it started.
        connections: how many it has; those of strangers are among them.
        known: what it knows of its jobs.
    """

    port: int
    answers: bool
    members: int
    jobs: int
    memory: Memory
    counters: dict[str, int]
    connections: int = 0  # an earlier version does not tell
    known: Annotated[tuple[JobStatus, ...], _INSIDE] = ()


@dataclass(frozen=True)
class ReducerStatus:
    """A reducer, all its threads together.

    Attributes:
        incarnation: another one at every start.
        address: where workers reach it, ``host:port``.
        host: what its machine calls itself.
        state: ``serving`` if it takes jobs; ``failing`` if a thread has ended or does not answer.
        uptime_s: since it began to serve, seconds.
        memory: sums over all threads.
        counters: likewise.
        jobs: those with the most memory first, at most `MAX_JOBS`.
    """

    version: str
    incarnation: str
    address: str
    state: State
    uptime_s: float
    memory: Memory
    counters: dict[str, int]
    jobs: tuple[JobStatus, ...]
    jobs_total: int
    lanes: tuple[LaneStatus, ...]
    host: str = ""  # an earlier version does not tell


_ADAPTER = TypeAdapter(ReducerStatus)


def dump(status: ReducerStatus) -> bytes:
    """Return a status as JSON."""
    return _ADAPTER.dump_json(status)


def load(data: bytes) -> ReducerStatus:
    """Read a status from JSON; what a later version adds to it is left out.

    Raises:
        RemoteProtocolError: it is none.
    """
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise RemoteProtocolError(f"no status of a reducer: {where}: {first['msg']}") from None


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks, in rising order, as ``0-3,7``; the first `MAX_RANGES` of them, then ``...``."""
    found = list(ranks)
    ends = [place for place, (a, b) in enumerate(pairwise(found), 1) if b != a + 1]
    bounds = list(pairwise([0, *ends, len(found)])) if found else []
    parts = [_range(found[start], found[end - 1]) for start, end in bounds[:MAX_RANGES]]
    return ",".join(parts + ["..."] * (len(bounds) > MAX_RANGES))


def _has(said: str, rank: int) -> bool:
    """Whether a rank is among those that `ranges` has written."""
    parts = (_RANGE.fullmatch(part) for part in said.split(","))
    return any(one and int(one[1]) <= rank <= int(one[2] or one[1]) for one in parts)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
