"""What `torture.guarantee` does to jobs and reducers, and how it sees that they got over it."""

import logging
import random
import signal
import time
from collections.abc import Callable, Mapping

from torture.guarantee_job import Job, Member, Tally, pump
from torture.guarantee_plan import THREADS
from torture.guarantee_pool import Reducers, reset

log = logging.getLogger(__name__)
HEAR_S = 0.05
GAP_S = 1.2  # that a reducer is away at most
STOP_S = 2.5  # that a process is stopped at most
SECOND = 0.3  # how often a fault is followed by another one before it is over
EARLY = 0.15  # how often a fault comes while a job begins
LEAVE_S = 4.0  # for the others to hear by themselves that a rank is gone
END_S = 40.0  # for all to leave, once they were told to
GOOD = 5  # right results that every thread of a rank must have after a fault
SAID = 3  # errors of a thread that are told of a job without them


class Arena:
    """Jobs on a pool, or without one if ranks host all reducers, and what happens to them.

    Attributes:
        weights: how often each fault comes, relative to the others.
        patience_s: within which a job must have good results again after a fault.
        elastic: whether a job goes on without a rank.
        resumes: whether connections that break go on.
        survives_pool: whether it goes on without reducers.
    """

    def __init__(
        self,
        jobs: list[Job],
        reducers: Reducers | None,
        weights: Mapping[str, float],
        tally: Tally,
        rng: random.Random,
        *,
        patience_s: float,
        elastic: bool,
        resumes: bool,
        survives_pool: bool,
    ) -> None:
        self.jobs = jobs
        self.reducers = reducers
        self._tally = tally
        self._rng = rng
        self._patience_s = patience_s
        self._elastic = elastic
        self._resumes = resumes
        self._survives_pool = survives_pool
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._intruders: list[tuple[Job, Member]] = []
        self._faults: dict[str, Callable[[], bool]] = {
            "reducer killed": lambda: self._end_reducer(signal.SIGKILL),
            "reducer drained": lambda: self._end_reducer(signal.SIGTERM),
            "reducer stopped": self._stop_reducer,
            "pool killed": self._kill_pool,
            "rank killed": self._kill_rank,
            "rank stopped": self._stop_rank,
            "connection reset": lambda: self._reset(everything=False),
            "connections reset": lambda: self._reset(everything=True),
            "job killed": self._kill_job,
            "rank replaced": self._replace_rank,
            "rank joins": lambda: self._rng.choice(self.jobs).join(),
        }
        self._weights = {kind: weights.get(kind, 0.0) for kind in self._faults}

    def __str__(self) -> str:
        """Say how all ranks are."""
        jobs = "; ".join(
            f"{job.part.job} {job.life}: "
            + ", ".join(f"{m.state} {[*m.right.values()]}+{m.failed} {m.why}" for m in job.members)
            for job in self.jobs
        )
        return jobs if self.reducers is None else f"{jobs}; reducers {self.reducers.well}"

    # -- the course of things -----------------------------------------------------------------

    def suffer(self) -> None:
        """Let a fault happen, perhaps another one, and see that all get over it."""
        self._begin_what_is_over()
        if self._rng.random() > EARLY:
            self._until(lambda: all(job.joined for job in self.jobs), self._patience_s)
            self._rest(self._rng.random() * 0.5)
        self._strike()
        while self._rng.random() < SECOND:
            self._rest(self._rng.random() * 0.4)
            self._strike()
        self._until(lambda: not self._later, self._patience_s)
        if self.reducers is not None:
            self._until(lambda: self.reducers is None or self.reducers.settled, END_S)
        self._settle()

    def go_on(self, enough: Callable[[], bool]) -> None:
        """Let jobs go on without faults until there is enough of something."""
        while not enough():
            self._begin_what_is_over()
            self._rest(0.5)
            self._settle()

    def finish(self) -> None:
        """Let all jobs end together, or nearly so."""
        self._settle()
        for job in self.jobs:
            job.finish(self._rng.randrange(2, 20))
        self._until(lambda: not any(job.running for job in self.jobs), LEAVE_S)
        for job in self.jobs:
            self._conclude(job)

    def close(self) -> None:
        """Kill everything."""
        for _, intruder in self._intruders:
            intruder.end()
        for job in self.jobs:
            job.end()
        if self.reducers is not None:
            self.reducers.stop()

    # -- faults -------------------------------------------------------------------------------

    def _strike(self) -> None:
        kinds, weights = zip(*self._weights.items(), strict=True)
        for _ in range(20):
            (kind,) = self._rng.choices(kinds, weights)
            for job in self.jobs:
                job.calm &= self._is_harmless(kind, job)
            if self._faults[kind]():
                for job in self.jobs:
                    job.struck += not self._goes_on(kind)
                self._tally.faults[kind] += 1
                log.info("%s: %s", kind, self)
                return

    def _goes_on(self, kind: str) -> bool:
        """Whether any number of these faults costs nothing: ranks join, or connections go on."""
        return kind == "rank joins" or (self._resumes and kind.startswith("connection"))

    def _is_harmless(self, kind: str, job: Job) -> bool:
        """Whether a fault may cost no call: another reducer is left, or the process group."""
        if self._goes_on(kind):
            return job.struck == 0
        if self.reducers is None or not kind.startswith(("reducer", "pool")):
            return False
        if self._survives_pool:
            return True
        return kind != "pool killed" and job.struck == 0 and len(self.reducers.well) > 1

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _a_reducer(self) -> int | None:
        if self.reducers is None or not self.reducers.well:
            return None
        return self._rng.choice(sorted(self.reducers.well))

    def _a_member(self) -> tuple[Job, Member] | None:
        members = [
            (job, member)
            for job in self.jobs
            for member in job.running
            if not member.stopped and (member.state == "running" or not job.part.leader)
        ]
        return self._rng.choice(members) if members else None

    def _end_reducer(self, number: signal.Signals) -> bool:
        pool, reducer = self.reducers, self._a_reducer()
        if pool is None or reducer is None:
            return False
        pool.signal(reducer, number)
        self._after(self._rng.random() * GAP_S, lambda: pool.start_again(reducer))
        return True

    def _stop_reducer(self) -> bool:
        pool, reducer = self.reducers, self._a_reducer()
        if pool is None or reducer is None:
            return False
        pool.signal(reducer, signal.SIGSTOP)
        self._after(self._span_s(), lambda: pool.signal(reducer, signal.SIGCONT))
        return True

    def _kill_pool(self) -> bool:
        if self.reducers is None or not self.reducers.well:
            return False
        for _ in range(len(self.reducers.well)):
            self._end_reducer(signal.SIGKILL)
        return True

    def _kill_rank(self) -> bool:
        if (chosen := self._a_member()) is None:
            return False
        chosen[1].signal(signal.SIGKILL)
        return True

    def _stop_rank(self) -> bool:
        if (chosen := self._a_member()) is None:
            return False
        _, member = chosen
        member.signal(signal.SIGSTOP)
        self._after(self._span_s(), lambda: member.signal(signal.SIGCONT))
        return True

    def _span_s(self) -> float:
        # Mostly shorter than what heartbeats take to notice.
        return self._rng.choice((0.1, 0.6, STOP_S)) * self._rng.random()

    def _reset(self, *, everything: bool) -> bool:
        pids = [member.pid for job in self.jobs for member in job.running if member.alive]
        ports = set()
        if self.reducers is not None:
            pids += [self.reducers.reducers[reducer].pid for reducer in self.reducers.well]
            ports = self.reducers.ports
        return bool(pids) and bool(
            reset(self._rng.choice(pids), ports, self._rng, everything=everything)
        )

    def _kill_job(self) -> bool:
        """Kill all ranks of a job; it begins again, perhaps under the same number."""
        job = self._rng.choice(self.jobs)
        if not job.running or not job.joined:
            return False
        for member in job.members:
            member.signal(signal.SIGKILL)
        return True

    def _replace_rank(self) -> bool:
        """Kill a rank, and start another process in its place, whose values are others.

        Before all have had results it may take that place: then nobody knew the first one.
        """
        if (chosen := self._a_member()) is None or self._intruders or not chosen[0].settled:
            return False
        job, member = chosen
        member.signal(signal.SIGKILL)
        intruder = (job, job.intrude(member.rank))
        self._intruders.append(intruder)
        self._after(self._rng.random() * 3.0, lambda: self._remove(intruder))
        return True

    def _remove(self, intruder: tuple[Job, Member]) -> None:
        intruder[1].end()
        self._intruders.remove(intruder)

    # -- what comes of them -------------------------------------------------------------------

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, seconds + 1.0)

    def _until(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Let things go on until something is so; return whether it is."""
        end = time.monotonic() + patience_s
        while not done():
            now = time.monotonic()
            if now > end:
                return False
            due = [one for one in self._later if one[0] <= now]
            self._later = [one for one in self._later if one[0] > now]
            for _, act in due:
                act()
            if self.reducers is not None:
                self.reducers.advance()
            next_s = min((at - now for at, _ in self._later), default=HEAR_S)
            pump(self.jobs, max(0.0, min(HEAR_S, next_s)), self._intruders)
        return True

    def _begin_what_is_over(self) -> None:
        for job in self.jobs:
            if self._is_over(job):
                log.info("over: %s", self)
                self._conclude(job)
                same = not job.part.leader and self._rng.random() < 0.3
                job.begin(same_generation=same and job.generation >= 0)

    def _is_over(self, job: Job) -> bool:
        running = [member for member in job.running if member.alive]
        if job.part.decider is not None:
            return len(running) < job.part.plan.ranks - 1
        if self._elastic:
            return len(running) < 2
        return len(running) < len(job.members)

    def _settle(self) -> None:
        """See that all jobs have good results again."""
        end = time.monotonic() + self._patience_s
        for job in self.jobs:
            self._await_results(job, end)

    def _await_results(self, job: Job, end: float) -> None:
        def is_good() -> bool:
            return all(
                right >= goals.get(member, {}).get(thread, 0) + GOOD
                for member in job.running
                for thread, right in member.right.items()
            )

        pump(self.jobs, 0.0, self._intruders)
        goals = {member: dict(member.right) for member in job.members}
        while True:
            self._until(lambda: self._is_over(job) or is_good(), end - time.monotonic())
            if not self._is_over(job) and is_good():
                job.settled = True
                return
            if time.monotonic() > end:
                self._give_up(job)
                return
            if self._is_over(job):
                self._begin_what_is_over()
                goals = {}

    def _give_up(self, job: Job) -> None:
        said = "; ".join(
            f"rank {m.rank}: {m.state}, {m.right} right, {m.failed} failed, steps {m.steps}, "
            f"{m.why}, {_latest(m.errors)}"
            for m in job.members
        )
        job.find(None, "stall", f"no good results for {self._patience_s:g} s: {said}")
        stuck = job.running
        self._abort(stuck)
        for member in stuck:
            job.find(member, "stall", "where it was")
        job.end()

    def _conclude(self, job: Job) -> None:
        """See that all ranks of a life that is over leave."""
        self._until(lambda: not job.running, LEAVE_S)
        job.stop()
        if not self._until(lambda: not job.running, END_S):
            late = job.running
            self._abort(late)
            for member in late:
                job.find(member, "hang", f"{member.state}: it did not leave within {END_S:g} s")
            job.end()

    def _abort(self, members: list[Member]) -> None:
        """Have ranks say where they are, and end."""
        for member in members:
            member.signal(signal.SIGABRT)
        self._until(lambda: not any(member.alive for member in members), 5.0)


def _latest(errors: list[str]) -> list[str]:
    """Return the latest errors of each thread, of which some may have many more than others."""
    said: list[str] = []
    for thread in THREADS:
        said += [error for error in errors if error.startswith(f"call {thread}.")][-SAID:]
    return said
