"""What a client has gone through; the lines in a job's output when a worker begins, and ends.

They are records of level INFO if the program has set up logging, which decides where they go; else
lines on standard error, unless the program wants to hear less of us.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reducer.logs import program_shows

if TYPE_CHECKING:
    from reducer.wire.messages import Straggler
    from worker_client.protocol.spec import JobSpec

_NAMED = 3  # addresses of reducers in a line; of more, their number
_OURS = logging.getLogger("worker_client")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """What a client has gone through so far; as text, a line.

    Attributes:
        rank, world_size: who it is.
        present: ranks that take part.
        calls, bytes_reduced, waited_s, losses: as of `Client`.
        fallbacks: all-reduces that the process group did, as no reducer was left.
        straggler: the rank that the others wait for again and again, and why, if there is one.
        failure: class and text of the error of the all-reduce that has ended last, named ones
            apart; "" if it ended well.
    """

    rank: int
    world_size: int
    present: tuple[int, ...]
    calls: int
    bytes_reduced: int
    waited_s: float
    losses: int
    fallbacks: int
    straggler: Straggler | None
    failure: str = ""

    def __str__(self) -> str:
        """Say all of it."""
        said = [
            f"{count(self.calls, 'all-reduce')}, {size(self.bytes_reduced)}",
            f"waited {self.waited_s:.1f} s",
            lost(self.losses),
        ]
        if self.fallbacks:
            said.append(f"{count(self.fallbacks, 'all-reduce')} by the process group")
        if gone := sorted({*range(self.world_size)} - {*self.present}):
            said.append(f"went on without rank {', '.join(map(str, gone))}")
        if self.straggler is not None and self.rank == self.present[0]:  # once a job
            said.append(f"{self.straggler}")
        if self.failure:
            said.append(f"the last one failed: {self.failure}")
        return ", ".join(said)


def lost(times: int) -> str:
    """Say how often a reducer was lost, which may have been the same one."""
    return f"reducers lost {times} times" if times > 1 else f"{times or 'no'} reducer lost"


def count(number: int, noun: str) -> str:
    """Return a number of things, in words."""
    return f"{number} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    """Return bytes, in words."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"


def begins(summary: Summary, spec: JobSpec, impl: str) -> None:
    """Say who takes part in what, with which implementation."""
    say(f"{_who(summary, spec)}: {reducers(spec)}, {impl} implementation")


def ends(summary: Summary, spec: JobSpec) -> None:
    """Say what a client has gone through."""
    say(f"{_who(summary, spec)}, ends: {summary}")


def _who(summary: Summary, spec: JobSpec) -> str:
    generation = f" (generation {spec.generation})" if spec.generation else ""
    return f"rank {summary.rank} of {summary.world_size}, job {spec.job}{generation}"


def reducers(spec: JobSpec) -> str:
    """Say which reducers a job uses."""
    pool = [address for at, address in enumerate(spec.reducers) if at not in spec.hosts]
    said = []
    if pool:
        listed = f" ({', '.join(pool)})" if len(pool) <= _NAMED else ""
        said.append(f"{count(len(pool), 'reducer')}{listed}")
    if spec.hosts:
        said.append("a reducer in every rank")
    return " and ".join(said)


def say(line: str) -> None:
    """Say a line of a job's, as the program wants to hear it."""
    if program_shows(log):
        log.info("%s", line)
    elif not (_OURS.level > logging.INFO or log.manager.disable >= logging.INFO or log.disabled):
        sys.stderr.write(f"reduction: {line}\n")  # in one piece: all ranks write to one terminal
        sys.stderr.flush()
