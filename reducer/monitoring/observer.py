"""How other threads learn what a serving thread knows, with no lock on the data path.

A serving thread looks at its own state between two steps of its loop, and only if it was asked.
The thread that asks gets records that nobody changes any more.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import reduce
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from reducer.engine.lateness import RankWaits, Waits, costliest
from reducer.engine.traffic import NO_TRAFFIC, Traffic
from reducer.monitoring.status import (
    MAX_HOSTS,
    MAX_JOBS,
    MAX_RANKS,
    JobStatus,
    JobTraffic,
    LaneStatus,
    Lately,
    Memory,
    RankStatus,
    ReducerStatus,
    State,
    ranges,
)
from reducer.wire.messages import worst

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.engine.engine import Engine
    from reducer.runtime.guard import Guard

T = TypeVar("T")
MOST_RANKS = 64  # of a job, that a thread tells; of fewer, their sums over all threads are exact
TOLD_RANKS = 2048  # of all jobs, that a thread tells: its work waits meanwhile
FRESH_S = 0.2  # a thread that asks again within this time gets the same answer
ANSWER_S = 2.0  # a serving thread looks up at least ten times a second
STALLED_S = 10.0  # one that has not looked up for so long hangs
LATELY_S = 60.0  # that rates and times of all-reduces are told of
SPARSE_S = 4.0  # between two looks that are kept for that; a history looks every 5 s


class StatusInbox:
    """Where other threads put their question to a serving thread.

    Attributes:
        ticked: when the thread last looked up, seconds of the monotonic clock; 0 before it serves.
    """

    def __init__(self, engine: Engine, guard: Guard, port: int) -> None:
        self.port = port
        self.ticked = 0.0
        self._engine = engine
        self._guard = guard
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[Engine], Any]]] = SimpleQueue()

    def ask(self, question: Callable[[Engine], Any] | None = None) -> Future[Any]:
        """Ask what a look at the engine tells, its `LaneStatus` by default.

        The answer comes when the thread looks up. To be called by other threads.
        """
        future: Future[Any] = Future()
        self._asked.put((future, question or self._look))
        return future

    def answer(self) -> None:
        """Answer all questions. To be called by the serving thread, between two steps."""
        self.ticked = time.monotonic()
        while not self._asked.empty():
            future, question = self._asked.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(question(self._engine))
                except Exception as error:  # noqa: BLE001 (the asker's: work goes on without it)
                    future.set_exception(error)

    def _look(self, engine: Engine) -> LaneStatus:
        return look(engine, self._guard.connections, self.port)


class Observer:
    """Reads the state of a whole reducer."""

    def __init__(
        self,
        inboxes: Sequence[StatusInbox],
        threads: Sequence[threading.Thread],
        stopping: threading.Event,
        *,
        version: str,
        address: str,
        incarnation: str,
    ) -> None:
        self._version = version
        self._address = address
        self.incarnation = incarnation
        self._inboxes = inboxes
        self._threads = threads
        self._stopping = stopping
        self._began = time.monotonic()
        self._lock = threading.Lock()  # of those who ask, so that they ask once for all
        self._latest: ReducerStatus | None = None
        self._looked = 0.0
        self._past = _Past()

    @property
    def uptime_s(self) -> float:
        """Seconds since the reducer began to serve."""
        return round(time.monotonic() - self._began, 3)

    def unhealthy(self) -> str:
        """Say what is wrong with the serving threads; nothing if all run, or have yet to begin."""
        now = time.monotonic()
        for inbox, thread in zip(self._inboxes, self._threads, strict=True):
            if thread.ident is not None and not thread.is_alive() and not self._stopping.is_set():
                return f"the thread at port {inbox.port} has ended: see the log"
            if thread.is_alive() and inbox.ticked and now - inbox.ticked > STALLED_S:
                return f"the thread at port {inbox.port} hangs: restart the reducer"
        return ""

    def unready(self) -> str:
        """Say why no worker should connect; nothing if they may."""
        if self._stopping.is_set():
            return "draining: it is shutting down"
        if not all(inbox.ticked for inbox in self._inboxes):
            return "starting: it does not serve yet"
        return self.unhealthy()

    def status(self) -> ReducerStatus:
        """Return the state, `FRESH_S` old at most."""
        with self._lock:
            if self._latest is None or time.monotonic() - self._looked > FRESH_S:
                self._latest = self._look()
                self._looked = time.monotonic()
            return self._latest

    def ask(self, question: Callable[[Engine], T] | None = None) -> list[T | None]:
        """Ask all threads, as `StatusInbox.ask`; the answer of one that hangs is None."""
        requests = [
            inbox.ask(question) if thread.is_alive() else None
            for inbox, thread in zip(self._inboxes, self._threads, strict=True)
        ]
        now = time.monotonic()
        answers: list[T | None] = []
        for inbox, request in zip(self._inboxes, requests, strict=True):
            # Each asker would wait anew for a thread that hangs, and all others for the asker.
            until = max((inbox.ticked or now) + ANSWER_S, now + FRESH_S)
            answers.append(None if request is None else _answer(request, until))
        return answers

    def _look(self) -> ReducerStatus:
        answers: list[LaneStatus | None] = self.ask()
        lanes = [
            lane or LaneStatus(inbox.port, False, 0, 0, Memory(0, 0, 0), {})
            for inbox, lane in zip(self._inboxes, answers, strict=True)
        ]
        counters: Counter[str] = Counter()
        for lane in lanes:
            counters.update(lane.counters)
        jobs = merge_jobs([job for lane in lanes for job in lane.known])
        if all(lane.answers for lane in lanes):  # what a silent one has done is missing
            jobs = self._past.compared(jobs, self.uptime_s)
        return ReducerStatus(
            version=self._version,
            incarnation=self.incarnation,
            address=self._address,
            state=self._state(all(lane.answers for lane in lanes)),
            uptime_s=self.uptime_s,
            memory=Memory(
                limit=sum(lane.memory.limit for lane in lanes),
                reserved=sum(lane.memory.reserved for lane in lanes),
                held=sum(lane.memory.held for lane in lanes),
            ),
            counters=dict(counters),
            jobs=tuple(jobs[:MAX_JOBS]),
            jobs_total=len(jobs),
            lanes=tuple(lanes),
            host=socket.gethostname(),
        )

    def _state(self, answers: bool) -> State:
        if self._stopping.is_set():
            return "draining"
        if not all(inbox.ticked for inbox in self._inboxes):
            return "starting"
        return "serving" if answers and not self.unhealthy() else "failing"


class _Past:
    """What jobs had moved at looks of the last minute, and at one before."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[tuple[str, int], Traffic]]] = deque()

    def compared(self, jobs: Sequence[JobStatus], now: float) -> list[JobStatus]:
        """Return jobs with what they have done lately, and remember what they have now."""
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - LATELY_S:
            looks.popleft()
        found = [replace(job, lately=self._lately(job, now)) for job in jobs]
        if not looks or now - looks[-1][0] >= SPARSE_S:
            looks.append((now, {(job.name, job.generation): job.moved for job in jobs}))
        return found

    def _lately(self, job: JobStatus, now: float) -> Lately | None:
        if not self._looks:
            return None
        key, earlier, then = (job.name, job.generation), NO_TRAFFIC, 0.0
        for at, moved in self._looks:
            then = at  # until it has been seen, it had nothing
            if key in moved:
                earlier = moved[key]
                break
        if earlier.bytes_in > job.moved.bytes_in:
            earlier = NO_TRAFFIC  # it ended, and began anew
        done = job.moved.since(earlier)
        return Lately(
            seconds=round(now - then, 3),
            bytes_in=done.bytes_in,
            bytes_out=done.bytes_out,
            all_reduces=done.all_reduces,
            median_s=done.quantile_s(0.5),
            p99_s=done.quantile_s(0.99),
        )


def look(engine: Engine, connections: int, port: int) -> LaneStatus:
    """Return what an engine knows; only the thread that it belongs to may look."""
    most = min(MOST_RANKS, max(MAX_RANKS, TOLD_RANKS // max(1, len(engine.jobs))))
    jobs = tuple(
        JobStatus(
            name=job.name,
            generation=job.generation,
            world_size=job.world_size,
            present=len(job.members),
            ranks_present="",  # the thread that asked writes them
            ranks_absent="",
            reserved=job.reserved,
            held=sum(member.held for member in job.members.values()),
            rounds=len(job.rounds),
            straggler=job.watch.straggler,
            ranks=frozenset(job.members),
            waits=costliest(job.rounds.lateness, most),
            moved=job.rounds.traffic(),
            host_names={rank: job.links[rank].host_name for rank in job.members},
        )
        for job in engine.jobs
    )
    quotas = engine.members.quotas
    return LaneStatus(
        port=port,
        answers=True,
        members=sum(job.present for job in jobs),
        jobs=len(jobs),
        memory=Memory(quotas.memory_limit, quotas.reserved(), engine.held()),
        counters=asdict(engine.counters),
        connections=connections,
        known=jobs,
    )


def merge_jobs(known: Sequence[JobStatus]) -> list[JobStatus]:
    """Join what threads know of the same jobs; the job that takes the most memory comes first.

    A rank is present if it is at all threads that know its job.
    """
    groups: dict[tuple[str, int], list[JobStatus]] = {}
    for job in known:
        groups.setdefault((job.name, job.generation), []).append(job)
    most_hosts = max(MAX_RANKS, MAX_HOSTS // max(1, len(groups)))
    found = [_merge_job(group, most_hosts) for group in groups.values()]
    return sorted(found, key=lambda job: (-job.reserved, job.name, job.generation))


def _merge_job(group: list[JobStatus], most_hosts: int) -> JobStatus:
    ranks = frozenset.intersection(*(job.ranks for job in group))
    waits = _merge_waits([one for job in group for one in job.waits])
    moved = reduce(Traffic.plus, (job.moved for job in group))
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted(group[0].host_names.items()):
        if host and (host in hosts or len(hosts) < most_hosts):
            hosts.setdefault(host, []).append(rank)
    return replace(
        group[0],
        present=len(ranks),
        ranks_present=ranges(sorted(ranks)),
        ranks_absent=ranges(rank for rank in range(group[0].world_size) if rank not in ranks),
        reserved=sum(job.reserved for job in group),
        held=sum(job.held for job in group),
        rounds=max(job.rounds for job in group),
        costliest_ranks=tuple(map(_rank_status, waits[:MAX_RANKS])),
        straggler=worst(job.straggler for job in group),
        traffic=JobTraffic.of(moved),
        hosts={host: ranges(its) for host, its in hosts.items()},
        ranks=ranks,
        waits=waits,
        moved=moved,
        threads=len(group),
    )


def _merge_waits(known: Sequence[RankWaits]) -> tuple[RankWaits, ...]:
    """Join what threads know of the same ranks; the costliest come first."""
    merged: dict[int, tuple[Waits, Waits]] = {}
    for one in known:
        late, slow = merged.get(one.rank, (Waits(), Waits()))
        merged[one.rank] = late.plus(one.late), slow.plus(one.slow)
    ordered = sorted(merged.items(), key=lambda one: (-sum(waits.us for waits in one[1]), one[0]))
    return tuple(RankWaits(rank, *its) for rank, its in ordered)


def _rank_status(waits: RankWaits) -> RankStatus:
    rank, late, slow = waits
    return RankStatus(
        rank=rank,
        late_waits=late.number,
        late_s=late.us / 1e6,
        late_buckets=late.octaves,
        slow_waits=slow.number,
        slow_s=slow.us / 1e6,
        slow_buckets=slow.octaves,
    )


def _answer(request: Future[T], deadline: float) -> T | None:
    try:
        return request.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        request.cancel()
        return None
