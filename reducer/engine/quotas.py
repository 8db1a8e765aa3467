"""What jobs, and all jobs of one key, may take of a reducer (sans I/O)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reducer.engine.allow_list import LOCAL
from reducer.errors import CapacityError
from reducer.wire.layout import LARGEST_CHUNK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reducer.engine.jobs import Job
    from reducer.engine.limits import Limits
    from reducer.engine.slots import Member
    from reducer.wire.messages import Hello

RESERVED_AT_ONCE = 1 << 20  # bytes; more is set aside for records in such steps
ROUNDS_AT_ONCE = 1024  # rounds that a job may begin before it has to ask again
WAIT = "wait until one has ended"
ONE_STREAM = "set REDUCTION_STREAMS=1 at the workers"


def _refusal(limit: str, said: str, advice: str, option: str = "") -> CapacityError:
    """Say which limit is reached, and what to do; `option` raises it, if not its namesake."""
    option = option or limit
    flag, variable = option.replace("_", "-"), option.upper()
    return CapacityError(
        f"{said}: {advice}, or raise the reducer's --{flag} (REDUCTION_{variable})", limit=limit
    )


class Quotas:
    """The bounds of memory, rounds, jobs and connections. A refused peer gets `CapacityError`.

    `memory_limit` bounds what all jobs that are here may reserve together, `limits` the rest.
    """

    def __init__(self, jobs: Mapping[int, Job], memory_limit: int, limits: Limits) -> None:
        self.memory_limit = memory_limit
        self._jobs = jobs
        self._limits = limits
        self._connections: Counter[str] = Counter()  # of members that have come with each key

    def reserved(self) -> int:
        """Bytes set aside for all jobs."""
        return sum(job.reserved for job in self._jobs.values())

    def check_job(self, hello: Hello, key: str, *, new: bool) -> None:
        """Refuse a job before anything is made that grows with it."""
        limits, name = self._limits, hello.job
        if new and len(self._jobs) >= (most := limits.max_jobs):
            raise _refusal("max_jobs", f"this reducer serves {most} jobs already", WAIT)
        if new and key and len(self._of(key)) >= (most := limits.max_jobs_per_key):
            serves = f"this reducer serves {most} jobs of this key already"
            raise _refusal("max_jobs_per_key", f"{serves} (a job is two if it has names)", WAIT)
        if hello.world_size > (most := limits.max_ranks):
            takes = f"job {name!r} has {hello.world_size} ranks, this reducer takes {most} of a job"
            raise _refusal("max_ranks", takes, "start fewer ranks")
        chunk_bytes = hello.chunk_bytes or LARGEST_CHUNK
        if chunk_bytes > (most := limits.max_chunk_bytes):
            takes = f"job {name!r} has chunks of {chunk_bytes} bytes, this reducer takes {most}"
            raise _refusal("max_chunk_bytes", takes, "lower REDUCTION_CHUNK_BYTES")

    def check_member(self, key: str, leaving: int) -> None:
        """Refuse a member of a key that has as many connections as it may, but for `leaving`."""
        most = self._limits.max_connections_per_key
        if key and most is not None and self._connections[key] - leaving >= most:
            raise _refusal(
                "max_connections_per_key",
                f"this reducer has {most} connections of this key already (a rank has one to each "
                "thread, and one more if its calls have names, besides REDUCTION_STREAMS)",
                "end other jobs of the key",
            )

    def check_stream(self, key: str) -> None:
        """Refuse a further stream if there are as many as may be, of all members or of the key."""
        most, of_key = self._limits.max_streams, self._limits.max_connections_per_key
        if most is not None and self._connections.total() >= most:
            taken = f"half of the {2 * most} connections that a thread may have are taken"
            raise _refusal("max_streams", taken, ONE_STREAM, "max_connections")
        if key not in {"", LOCAL} and of_key is not None and self._connections[key] >= of_key // 2:
            taken = f"half of the {of_key} connections that this key may have are taken"
            raise _refusal("max_connections_per_key", taken, ONE_STREAM)

    def count(self, key: str, more: int = 1) -> None:
        """Count connections that have come with a key, or have gone."""
        self._connections[key] += more
        if not self._connections[key]:
            del self._connections[key]

    def reserve(self, job: Job, window: int, freed: int) -> None:
        """Set aside what a job needs for a window, when other jobs have freed so many bytes."""
        why = f"{job.world_size} ranks with a window of {window}"
        self._reserve_memory(job, _needed(job, window), why, "lower REDUCTION_WINDOW_BYTES", freed)
        job.window = max(job.window, window)

    def extend(self, job: Job, member: Member, window: int) -> None:
        """Let a member have a larger window, as far as there is memory for all ranks."""
        left = self.memory_limit - self.reserved() + job.reserved
        if self._limits.job_memory_limit is not None:
            left = min(left, self._limits.job_memory_limit - self._of_others(job))
        share = left // 2  # the rest is for jobs that grow as well, or have yet to come
        room = share // (job.world_size + 1) - job.spare
        member.window = max(member.window, min(window, max(room, job.window)))
        job.window = max(job.window, member.window)
        job.rounds.reserved = _needed(job, job.window)

    def reserve_more(self, job: Job, nbytes: int) -> None:
        """Set aside more for the records of a job's all-reduces, if there is room."""
        needed = job.reserved + max(nbytes, RESERVED_AT_ONCE)
        self._reserve_memory(job, needed, "many chunks at once", "raise REDUCTION_CHUNK_BYTES")

    def raise_limit(self, job: Job) -> None:
        """Let a job begin more rounds, if it may, and all jobs of its key."""
        if not self.raises_limit(job):
            most = self._limits.max_rounds
            have = f"job {job.name!r} or others of its key have {most} all-reduces in progress here"
            raise _refusal("max_rounds", have, "wait for some of them")

    def raises_limit(self, job: Job) -> bool:
        """Let a job begin more rounds, if it may; return whether it may."""
        jobs = self._of(job.key_shown) if job.key_shown else [job]
        for each in jobs:
            each.rounds.limit = len(each.rounds)  # what it was granted and has not used
        free = self._limits.max_rounds - sum(each.rounds.limit for each in jobs)
        job.rounds.limit += min(max(free, 0), ROUNDS_AT_ONCE)
        return free > 0

    def _reserve_memory(self, job: Job, needed: int, why: str, advice: str, freed: int = 0) -> None:
        needs = f"job {job.name!r} needs {needed} bytes of a reducer ({why})"
        advice += ", add reducers"
        free = self.memory_limit - self.reserved() + freed
        if needed - job.reserved > free:
            are_free = f"{free} of {self.memory_limit} are free"
            said = f"{needs}, {are_free} (its log says if its machine has less)"
            raise _refusal("memory_limit", said, advice)
        most, others = self._limits.job_memory_limit, self._of_others(job)
        if most is not None and needed + others > most:
            beside = f", beside {others} of other jobs of its key" if others else ""
            said = f"{needs}{beside}, one job may take {most}"
            raise _refusal("job_memory_limit", said, advice)
        job.rounds.reserved = needed

    def _of(self, key: str) -> list[Job]:
        """Return the jobs whose first rank has shown a key."""
        return [job for job in self._jobs.values() if job.key_shown == key]

    def _of_others(self, job: Job) -> int:
        """Return what other jobs of a job's key have reserved, bytes."""
        if not job.key_shown:
            return 0
        return sum(one.reserved for one in self._of(job.key_shown) if one.key != job.key)


def _needed(job: Job, window: int) -> int:
    """Return what a job reserves for windows of this size, bytes; never less than it has.

    That is n windows of contributions, and results that the slowest rank has not taken: one more.
    """
    return max(job.reserved, (job.world_size + 1) * (window + job.spare))
