"""One line when a worker begins and one when it ends: for whoever looks at a job's output later.

They are records of level INFO if the program has set up logging, which decides where they go; else
lines on standard error.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker_client.client.client import Client

_NAMED = 3  # addresses of reducers in a line; of more, their number

log = logging.getLogger(__name__)


def begin(client: Client) -> None:
    """Say who takes part in what, and say at its shutdown what came of it."""
    client.on_end = end
    _say(f"rank {client.rank} of {client.world_size}, {_job(client)}: {_reducers(client)}")


def end(client: Client) -> None:
    """Say what a client has gone through."""
    counters = client.counters
    said = [
        f"{_count(client.calls, 'all-reduce')}, {_size(client.bytes_reduced)}",
        f"waited {client.waited_s:.1f} s",
        _lost(client.losses),
    ]
    if counters.fallbacks:
        said.append(f"{_count(counters.fallbacks, 'all-reduce')} by the process group")
    if lost := sorted({*range(client.world_size)} - {*client.present}):
        said.append(f"went on without rank {', '.join(map(str, lost))}")
    _say(f"rank {client.rank} of {client.world_size}, {_job(client)}, ends: {', '.join(said)}")


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
