"""How soon the others know that a rank was killed, and whether its reducers keep anything of it.

    python -m torture.rank_loss --tries 20

bench/README.md defines every option and figure.
"""

import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import psutil
import typer

from bench import options
from harness import HarnessError, pool
from lab import Lab
from torture.fault_job import LEAVE_S, Job

ELEMENTS = 500_000  # 2 MB: there is always something under way
BOUND_S = 2.0
PATIENCE_S = 10.0  # later ones count as that late
# Of a reducer's resident memory: what an allocator may keep. What a rank of a lost generation has
# in flight at each reducer is a megabyte, so that 20 generations that stay do not fit.
SLACK_BYTES = 8 << 20
BEFORE_BASE = 2  # tries; the first ones make what a reducer needs once


@dataclass
class Found:
    """What the tries gave.

    Attributes:
        seconds: of each try, from the kill until the last of the others has its error.
        misnamed: what ranks said who did not name the rank that was killed.
        base_rss, rss: of each reducer after the first tries, and at the end, bytes.
    """

    seconds: list[float] = field(default_factory=list)
    misnamed: list[str] = field(default_factory=list)
    base_rss: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        """99th percentile of the tries."""
        return float(np.percentile(self.seconds, 99))

    @property
    def kept(self) -> int:
        """Bytes that a reducer has grown by since the first tries, of the one that has most."""
        pairs = zip(self.rss, self.base_rss, strict=True)
        return max((now - base for now, base in pairs), default=0)

    @property
    def good(self) -> bool:
        """Whether every rank was named, in time, and nothing stays."""
        return not self.misnamed and self.p99_s <= BOUND_S and self.kept <= SLACK_BYTES

    def __str__(self) -> str:
        median, worst = np.median(self.seconds), max(self.seconds)
        text = (
            f"{len(self.seconds)} tries: every other rank knew after {median:.3f} s (median), "
            f"{self.p99_s:.3f} s (p99), {worst:.3f} s (max); misnamed {len(self.misnamed)}"
        )
        if self.rss:
            base, now = max(self.base_rss) / 1e6, max(self.rss) / 1e6
            text += f"; reducers' RSS {base:.1f} MB at first, {now:.1f} MB at the end"
            text += f" (grown by {self.kept / 1e6:.1f} MB at most)"
        return text


def main(
    tries: Annotated[int, typer.Option(min=1, help="How often a rank is killed.")] = 20,
    workers: Annotated[int, typer.Option(min=2, help="Ranks.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 2,
    embedded: options.Embedded = False,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that share the tries, at once.")] = 1,
) -> None:
    """Kill ranks of a job on loopback, and time how soon the others have their errors."""
    with options.command("torture.rank_loss"):
        found = measure(tries, workers, 0 if embedded else reducers, jobs)
    print(found, *found.misnamed, sep="\n")
    sys.exit(int(not found.good))


def measure(tries: int, workers: int = 4, reducers: int = 2, jobs: int = 1) -> Found:
    """Kill a rank, another one each time, as often as `tries` says.

    So many `jobs` share the tries, at the same time on the same pool; without reducers, ranks host
    them.
    """
    found = Found()
    with Lab.loopback(jobs * workers + reducers) as lab, ExitStack() as stack:
        started = pool.start(lab.hosts[jobs * workers :])
        servers = [reducer.address for reducer in started]
        crews = [
            stack.enter_context(Job(lab, lab.hosts[at : at + workers], servers))
            for at in range(0, jobs * workers, workers)
        ]
        while (done := len(found.seconds)) < tries:
            victims = {job: (done + at) % workers for at, job in enumerate(crews[: tries - done])}
            for job in victims:
                job.begin(ELEMENTS)
            killed = {job: kill(job, victim) for job, victim in victims.items()}
            for job, victim in victims.items():
                judge(job, victim, killed[job], found)
            for job in victims:
                renew(job, everybody=not reducers)
            found.rss = [psutil.Process(reducer.pid).memory_info().rss for reducer in started]
            if len(found.seconds) <= max(BEFORE_BASE, jobs):
                found.base_rss = found.rss
    return found


def kill(job: Job, victim: int) -> float:
    job.wait_for_steps(3, PATIENCE_S)
    if job.done < 3:
        raise HarnessError(f"the job does not work: {job.told}")
    time.sleep(random.uniform(0, 0.2))  # noqa: S311 (anywhere in an all-reduce)
    start = time.monotonic()
    job.ranks[victim].signal(signal.SIGKILL)
    return start


def judge(job: Job, victim: int, start: float, found: Found) -> None:
    """See what the others say of a rank that was killed at `start`, and how soon."""
    others = [rank for rank in range(len(job.ranks)) if rank != victim]
    job.wait_for_failure(PATIENCE_S, others)
    found.seconds.append(max(_told(job, rank, victim, found) for rank in others) - start)


def _told(job: Job, rank: int, victim: int, found: Found) -> float:
    """Return when a rank had its error, and note if that was not the right one."""
    failure = job.ranks[rank].told.failure
    if failure is None:
        found.misnamed.append(f"rank {rank} had no error: rank {victim} was killed")
        return time.monotonic() + PATIENCE_S
    if (failure.error, failure.rank) != ("RankLostError", victim):
        said = f"{failure.error}: {failure.text}"
        found.misnamed.append(f"rank {rank} said {said!r}: rank {victim} was killed")
    return failure.at


def renew(job: Job, *, everybody: bool) -> None:
    """Make a job ready for its next generation: replace the ranks that are gone."""
    gone: Sequence[int] = [rank for rank, told in enumerate(job.told) if told.failure is None]
    if everybody:  # a process group cannot be made again without the rank that is gone
        gone = range(len(job.ranks))
    elif not job.wait_for_end(LEAVE_S):
        raise HarnessError(f"a rank did not leave: {job.told}")
    for rank in gone:
        job.replace(rank)


if __name__ == "__main__":
    typer.run(main)
