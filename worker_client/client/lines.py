"""The line in a job's output when a worker begins, and the one when it ends.

They are records of level INFO if the program has set up logging, which decides where they go; else
lines on standard error, unless the program wants to hear less of us.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from reducer.logs import program_shows
from worker_client.client.summary import count

if TYPE_CHECKING:
    from worker_client.client.client import Client

_NAMED = 3  # addresses of reducers in a line; of more, their number

_OURS = logging.getLogger("worker_client")

log = logging.getLogger(__name__)


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
        said.append(f"{count(len(pool), 'reducer')}{listed}")
    if spec.hosts:
        said.append("a reducer in every rank")
    return f"{' and '.join(said)}, {client.impl} implementation"


def _say(line: str) -> None:
    if program_shows(log):
        log.info("%s", line)
    elif not (_OURS.level > logging.INFO or log.manager.disable >= logging.INFO or log.disabled):
        sys.stderr.write(f"reduction: {line}\n")  # in one piece: all ranks write to one terminal
        sys.stderr.flush()
