"""What NCCL's RAS subsystem tells of communicators, of a reducer's jobs: ``/ras.json``.

Programs that watch NCCL's jobs read what ``ncclras -f json`` prints, since NCCL 2.28: fields and
their meanings are those of its user guide. A job is a communicator here. `AllReduce` counts the
all-reduces that a rank has begun as far as this reducer can tell, so the counts of a job's ranks
differ while it waits for some of them. What a reducer does not know is what RAS says of such
things: -1 for a process and for devices, ``unknown`` for a host.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.wire.constants import PLACES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.engine.engine import Engine
    from reducer.engine.jobs import Job
    from reducer.monitoring.observer import Observer

MOST_RANKS = 2048  # of all jobs, that are told: the work of a thread that looks waits meanwhile
MOST_OPEN = 16  # all-reduces of a job that have begun, and are looked at, the oldest first
FRESH_S = 0.2  # who asks again within this time gets the same answer
SUCCESS, IN_PROGRESS = 0, 7  # of NCCL's results


class _BegunCalls(NamedTuple):
    """How far a job's ranks have come, as one thread knows.

    Attributes:
        key: the job's, in headers.
        begun: all-reduces that each of the ranks that are here has begun.
        hosts: names of their hosts, as they have said.
        lost: ranks that have left, in whatever way.
    """

    key: int
    generation: int
    world_size: int
    begun: dict[int, int]
    hosts: dict[int, str]
    lost: frozenset[int]


def look(engine: Engine) -> list[_BegunCalls]:
    """Return how far jobs have come; only the thread that the engine belongs to may look."""
    found: list[_BegunCalls] = []
    left = MOST_RANKS
    for job in sorted(engine.jobs, key=lambda one: -one.reserved):
        if job.world_size > left:
            continue
        left -= job.world_size
        hosts = {rank: job.links[rank].host_name for rank in job.members}
        lost = frozenset(job.lost)
        found.append(_BegunCalls(job.key, job.generation, job.world_size, _begun(job), hosts, lost))
    return found


def _begun(job: Job) -> dict[int, int]:
    # Not each rank's own watermark: what they say of it lags behind, for each differently.
    all_have = max((member.watermark for member in job.members.values()), default=0)
    some_have: dict[int, int] = {}
    looked = 0
    for sequence, round_ in job.rounds.live():
        if not round_.open:
            all_have = max(all_have, sequence + PLACES)
        elif looked < MOST_OPEN:
            looked += 1
            having = (rank for rank in job.members if round_.has_begun(rank))
            some_have |= dict.fromkeys(having, sequence + PLACES)
    return {rank: max(all_have, some_have.get(rank, 0)) // PLACES for rank in job.members}


class Ras:
    """Tells of all threads' jobs together, `FRESH_S` old at most."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()  # of those who ask, so that they ask once for all
        self._told = b""
        self._looked = 0.0

    def told(self) -> bytes:
        """Return the JSON."""
        with self._lock:
            began = time.monotonic()
            if not self._told or began - self._looked > FRESH_S:
                answers = self._observer.ask(look)
                known = [answer for answer in answers if answer is not None]
                self._looked = time.monotonic()
                said = {"collection_time_sec": round(self._looked - began, 3)}
                said["timeouts_count"] = len(answers) - len(known)
                self._told = _document(known, self._observer.status().version, said)
            return self._told


def _document(known: Sequence[list[_BegunCalls]], version: str, ras: dict[str, float]) -> bytes:
    jobs: dict[tuple[int, int], list[_BegunCalls]] = {}
    for one in (calls for lane in known for calls in lane):
        jobs.setdefault((one.key, one.generation), []).append(one)
    communicators = [_communicator(group) for group in jobs.values()]
    document = {
        "nccl_version": f"reducer {version}",
        "cuda_runtime_version": -1,
        "cuda_driver_version": -1,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": ras,
    }
    return json.dumps(document).encode()


def _communicator(group: Sequence[_BegunCalls]) -> dict[str, Any]:
    """Join what threads know of a job: each sees the all-reduces that it has a part of."""
    first = group[0]
    here = sorted(frozenset.intersection(*(frozenset(one.begun) for one in group)))
    lost = frozenset.union(*(one.lost for one in group))
    missing = [rank for rank in range(first.world_size) if rank not in here]
    state = SUCCESS if lost.issuperset(missing) else IN_PROGRESS
    return {
        "hash": f"{first.key:#x}",
        "secondary_hash": f"{first.generation:#x}:0x0",
        "size": first.world_size,
        "ranks_count": len(here),
        "missing_ranks_count": len(missing),
        "ranks": [
            {
                **_rank(rank, first.hosts[rank]),
                "status": {
                    "init_state": state,
                    "async_error": SUCCESS,
                    "finalize_called": False,
                    "destroy_flag": False,
                    "abort_flag": False,
                },
                "collective_counts": {"AllReduce": max(one.begun[rank] for one in group)},
            }
            for rank in here
        ],
        "missing_ranks": [
            {
                **_rank(rank, ""),
                "status": {"unresponsive": True, "considered_dead": rank in lost},
            }
            for rank in missing
        ],
    }


def _rank(rank: int, host: str) -> dict[str, Any]:
    return {"rank": rank, "host": host or "unknown", "pid": -1, "cuda_dev": -1, "nvml_dev": -1}
