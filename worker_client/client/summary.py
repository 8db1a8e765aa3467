"""What a client has gone through, and the lines that say so when a worker begins and ends.

The lines are for whoever looks at a job's output later. They are records of level INFO if the
program has set up logging, which decides where they go; else lines on standard error.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reducer.wire.messages import Straggler
    from worker_client.client.client import Client

_NAMED = 3  # addresses of reducers in a line; of more, their number

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

    def __str__(self) -> str:
        """Say all of it."""
        said = [
            f"{_count(self.calls, 'all-reduce')}, {_size(self.bytes_reduced)}",
            f"waited {self.waited_s:.1f} s",
            _lost(self.losses),
        ]
        if self.fallbacks:
            said.append(f"{_count(self.fallbacks, 'all-reduce')} by the process group")
        if lost := sorted({*range(self.world_size)} - {*self.present}):
            said.append(f"went on without rank {', '.join(map(str, lost))}")
        if self.straggler is not None and self.rank == self.present[0]:  # once a job
            said.append(f"{self.straggler}")
        return ", ".join(said)


def of(client: Client) -> Summary:
    """Return what a client has gone through so far."""
    return Summary(
        rank=client.rank,
        world_size=client.world_size,
        present=client.present,
        calls=client.calls,
        bytes_reduced=client.bytes_reduced,
        waited_s=client.waited_s,
        losses=client.losses,
        fallbacks=client.counters.fallbacks,
        straggler=client.straggler,
    )


def begin(client: Client) -> None:
    """Say who takes part in what, and say at its shutdown what came of it."""
    client.on_end = end
    _say(f"rank {client.rank} of {client.world_size}, {_job(client)}: {_reducers(client)}")


def end(client: Client) -> None:
    """Say what a client has gone through."""
    rank, world_size = client.rank, client.world_size
    _say(f"rank {rank} of {world_size}, {_job(client)}, ends: {client.summary()}")


def _job(client: Client) -> str:
    spec = client.spec
    generation = f" (generation {spec.generation})" if spec.generation else ""
    return f"job {spec.job}{generation}"


def _reducers(client: Client) -> str:
    spec = client.spec
    pool = [a for at, a in enumerate(spec.reducers) if at not in spec.hosts]
    said = []
    if pool:
        listed = f" ({', '.join(pool)})" if len(pool) <= _NAMED else ""
        said.append(f"{_count(len(pool), 'reducer')}{listed}")
    if spec.hosts:
        said.append("a reducer in every rank")
    return f"{' and '.join(said)}, {client.impl} implementation"


def _lost(times: int) -> str:
    """Say how often a reducer was lost, which may have been the same one."""
    return f"reducers lost {times} times" if times > 1 else f"{times or 'no'} reducer lost"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"


def _say(line: str) -> None:
    if log.hasHandlers():
        log.info("%s", line)
    else:
        sys.stderr.write(f"reduction: {line}\n")  # in one piece: all ranks write to one terminal
        sys.stderr.flush()
