"""Which ranks were late, slow or absent over the last ten minutes: a strip of cells for each rank.

A cell is the time between two samples of a history, as one letter: `.` all was well; `l` or `L`
the others waited for this rank alone, as it came late, for 2 % of the time or for 10 %; `s` or `S`
likewise, as its contributions took longer; `a` it was absent; a space: nothing is known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.monitoring.status import MAX_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reducer.monitoring.status import JobStatus, ReducerStatus

CELLS = 120
MAX_STRIPS = 16  # jobs that have some: those with the most memory
MAX_ROWS = 16  # ranks of a job that have one
LEAST_SHARE, LARGE_SHARE = 0.02, 0.1  # of the time
UNKNOWN, WELL, ABSENT = " .a"


@dataclass(frozen=True)
class RankStrip:
    """What a rank did.

    Attributes:
        cells: a letter each, the latest one last; as many as there are samples of the job.
        waited_s: how long the others waited for it alone meanwhile, seconds.
    """

    rank: int
    cells: str
    waited_s: float


@dataclass(frozen=True)
class JobStrips:
    """Strips of the ranks of a job; of many ranks, those for which the others waited most.

    Attributes:
        others: how many ranks have none, as for them nobody waited, or not as long.
    """

    name: str
    generation: int
    ranks: tuple[RankStrip, ...]
    others: int


@dataclass
class _Cell:
    """What is known of a job's ranks between two samples: of those that are not named, all is well.

    Attributes:
        waited: by rank, for which share of the time the others waited, late and slow.
    """

    seconds: float
    waited: Mapping[int, tuple[float, float]]
    absent: frozenset[int]

    def letter(self, rank: int) -> str:
        """Return that of a rank."""
        if rank in self.absent:
            return ABSENT
        late, slow = self.waited.get(rank, (0.0, 0.0))
        if late + slow < LEAST_SHARE:
            return WELL
        letter = "l" if late >= slow else "s"
        return letter.upper() if late + slow >= LARGE_SHARE else letter


@dataclass
class _Seen:
    """What is known of a job.

    Attributes:
        waited_us: by rank, since it began, as the latest sample has it.
        cells: None for a time of which nothing is known.
    """

    job: JobStatus
    waited_us: dict[int, tuple[int, int]]
    cells: deque[_Cell | None] = field(default_factory=lambda: deque(maxlen=CELLS))

    def take(self, job: JobStatus, seconds: float, missed: int) -> None:
        """Learn what the job is like, so many seconds and missed samples after the one before."""
        before, self.job, self.waited_us = self.waited_us, job, _waited_us(job)
        now = self.waited_us
        # A thread tells of so many ranks at least: what others had cost was nothing, or unknown.
        known = now if len(before) < MAX_RANKS else before.keys() & now
        waited: dict[int, tuple[float, float]] = {}
        for rank in known:
            was = before.get(rank, (0, 0))
            # Every thread waits for it, and they do so at the same time.
            late, slow = (
                max(0.0, (us - earlier) / 1e6 / seconds / job.threads)
                for us, earlier in zip(now[rank], was, strict=True)
            )
            if late + slow > 0:
                waited[rank] = late, slow
        absent = frozenset(range(job.world_size)) - job.ranks
        self.cells.extend([None] * min(missed, CELLS))
        self.cells.append(_Cell(seconds, waited, absent))

    def told(self) -> JobStrips:
        """Return the strips."""
        known = [cell for cell in self.cells if cell is not None]
        lost: dict[int, float] = {}
        for cell in known:
            for rank, (late, slow) in cell.waited.items():
                lost[rank] = lost.get(rank, 0.0) + min(1.0, late + slow) * cell.seconds
        size = self.job.world_size
        chosen = list(range(size))
        if size > MAX_ROWS:
            away = frozenset[int]().union(*(cell.absent for cell in known))
            order = sorted(away | lost.keys(), key=lambda rank: (-lost.get(rank, 0.0), rank))
            chosen = sorted(order[:MAX_ROWS])
        strips = tuple(
            RankStrip(rank, self._letters(rank), round(lost.get(rank, 0.0), 1)) for rank in chosen
        )
        return JobStrips(self.job.name, self.job.generation, strips, size - len(strips))

    def _letters(self, rank: int) -> str:
        return "".join(UNKNOWN if cell is None else cell.letter(rank) for cell in self.cells)


def _waited_us(job: JobStatus) -> dict[int, tuple[int, int]]:
    return {one.rank: (one.late.us, one.slow.us) for one in job.waits}


class Strips:
    """What is known of all jobs that are here."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._at = 0.0  # of the latest sample, seconds
        self.told: tuple[JobStrips, ...] = ()

    def take(self, status: ReducerStatus, sample_s: float) -> None:
        """Take a sample; there is one every `sample_s`, but for those that nobody could take."""
        seconds, self._at = status.uptime_s - self._at, status.uptime_s
        missed = max(0, round(seconds / sample_s) - 1) if sample_s else 0
        earlier, self._seen = self._seen, {}
        for job in status.jobs[:MAX_STRIPS]:
            key = job.name, job.generation
            seen = self._seen[key] = earlier.get(key) or _Seen(job, _waited_us(job))
            if key in earlier:
                seen.take(job, max(seconds, 1e-3), missed)
        self.told = tuple(seen.told() for seen in self._seen.values())
