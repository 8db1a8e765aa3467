"""One rank of a job that faults are brought upon: all-reduces until told, and tells how each ended.

``python -m torture.fault_rank`` reads a `Part` as a line of JSON, takes that part, and then waits
for the next one, until its standard input ends. What it tells are lines of JSON as well, each with
the time of the machine's monotonic clock (``at``), which all hosts of a lab share.
"""

import faulthandler
import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import worker_client
from harness import oracle
from harness.processes import say
from reducer.errors import ReductionError
from worker_client.client.bootstrap import connect
from worker_client.client.client import Client

SCALES = 16  # so many all-reduces in a row have results of their own


@dataclass(frozen=True)
class Part:
    """A rank's part in one generation of a job.

    Attributes:
        rank, world_size, job, generation, servers: as of `worker_client.init`.
        elements: fp32 values in each all-reduce.
        count: all-reduces; 0 for as many as there are before an error.
        leader: ``host:port`` at which the ranks of an embedded job make a process group.
        pace: all-reduces a second, after `warm` as fast as can be; 0 for all of them so.
    """

    rank: int
    world_size: int
    job: str
    generation: int
    servers: tuple[str, ...]
    elements: int
    count: int
    leader: str = ""
    pace: float = 0.0
    warm: int = 0


class Losses(logging.Handler):
    """Tells when the client takes a reducer out of use, as soon as it logs anything about it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.client: Client | None = None
        self._told = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, and look."""
        _say("warning", text=record.getMessage())
        self.look()

    def look(self) -> None:
        """Tell of losses that were not told yet."""
        if self.client is None:
            return
        losses = self.client.counters.losses
        if losses > self._told:
            self._told = losses
            _say("lost", reducers=[at for at, used in enumerate(self.client.in_use) if not used])

    def watch(self, client: Client | None) -> None:
        """Begin with another client, or with none."""
        self.client, self._told = client, 0


def take(part: Part, losses: Losses) -> None:
    """All-reduce as often as `part` says, or until an error; tell of every end."""
    original = oracle.contribution(part.rank, part.elements)
    array = np.empty_like(original)
    number = -1
    start = warm = time.monotonic()
    try:
        with _join(part) as client:
            losses.watch(client)
            _say("joined")
            for number in range(part.count or sys.maxsize):
                # The fold of contributions that are all scaled by a power of two is the scaled
                # fold, to the last bit: so every element of every result is known.
                scale = np.float32(2.0 ** (number % SCALES))
                np.multiply(original, scale, out=array)
                start = time.monotonic()
                client.all_reduce(array, op="sum").wait()
                end = time.monotonic()
                np.multiply(array, 1 / scale, out=array)
                wrong = oracle.wrong(array, part.world_size, exact=True)
                losses.look()
                in_use = sum(client.in_use)
                _say("step", end, seconds=end - start, wrong=wrong, in_use=in_use)
                if number < part.warm:
                    warm = end
                elif part.pace:
                    due = warm + (number - part.warm + 1) / part.pace
                    time.sleep(max(0.0, due - time.monotonic()))
    except ReductionError as error:
        facts: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
        facts |= {"rank": getattr(error, "rank", None), "number": number}
        _say("error", seconds=time.monotonic() - start, **facts)
    finally:
        losses.watch(None)
    _say("over")


def _join(part: Part) -> Client:
    who: dict[str, Any] = {"rank": part.rank, "world_size": part.world_size}
    if not part.leader:
        return connect(servers=part.servers, job=part.job, generation=part.generation, **who)
    from torch import distributed  # noqa: PLC0415 (a pool's workers do not load it)

    distributed.init_process_group("gloo", init_method=f"tcp://{part.leader}", **who)
    return worker_client.init(embedded=True)


def _say(what: str, at: float | None = None, **facts: Any) -> None:
    say({"what": what, "at": at or time.monotonic(), **facts})


def main() -> None:
    faulthandler.enable()  # a crash says where, on standard error
    losses = Losses()
    log = logging.getLogger("worker_client")
    log.addHandler(losses)
    log.propagate = False
    for line in sys.stdin:
        take(Part(**json.loads(line)), losses)


if __name__ == "__main__":
    main()
