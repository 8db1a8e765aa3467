"""A reducer's status in Prometheus' text format, with labels that are bounded in number."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args, get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from reducer.engine.rounds import EngineCounters
from reducer.monitoring.status import OCTAVES, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import Metric

    from reducer.monitoring.status import JobStatus, LaneStatus, ReducerStatus

MAX_LABELLED_JOBS = 32  # those with the most memory; a job's name is a tenant's to choose

_COUNTERS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(EngineCounters, include_extras=True).items()
}


class Metrics:
    """What ``/metrics`` answers."""

    def __init__(self, status: Callable[[], ReducerStatus]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatusCollector(status))
        ProcessCollector(registry=self._registry)
        self._encode, self.content_type = choose_encoder("")

    def text(self) -> bytes:
        """Return all metrics."""
        return self._encode(self._registry)


class _StatusCollector(Collector):
    """Turns a status into metrics whenever it is asked for them."""

    def __init__(self, status: Callable[[], ReducerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Describe nothing: a reducer that has yet to start need not be asked."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the status."""
        status = self._status()
        about = {"version": status.version, "incarnation": status.incarnation}
        yield InfoMetricFamily("reducer", "The reducer's software and its start.", value=about)
        serving = float(status.state == "serving")
        yield GaugeMetricFamily("reducer_serving", "1 if it takes jobs.", value=serving)
        states = {each: each == status.state for each in get_args(State)}
        yield _gauge("state", "1 for the state it is in.", "state", states)
        yield GaugeMetricFamily("reducer_jobs", "Jobs that are here.", value=status.jobs_total)
        yield from _lanes(status)
        yield from _jobs(status)


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(f"reducer_{name}", about, labels=[label])
    for of, value in values.items():
        gauge.add_metric([of], value)
    return gauge


def _lanes(status: ReducerStatus) -> Iterator[Metric]:
    up = {str(lane.port): lane.answers for lane in status.lanes}
    yield _gauge("lane_up", "1 if this thread answers.", "port", up)
    lanes = {str(lane.port): lane for lane in status.lanes if lane.answers}
    about: dict[str, tuple[str, Callable[[LaneStatus], int]]] = {
        "members": ("Ranks connected.", lambda lane: lane.members),
        "connections": ("Connections.", lambda lane: lane.connections),
        "memory_limit_bytes": ("Bytes that jobs may reserve.", lambda lane: lane.memory.limit),
        "memory_reserved_bytes": ("Bytes set aside for jobs.", lambda lane: lane.memory.reserved),
        "memory_held_bytes": (
            "Bytes of contributions that wait for others.",
            lambda lane: lane.memory.held,
        ),
    }
    for name, (text, value) in about.items():
        yield _gauge(name, text, "port", {port: value(lane) for port, lane in lanes.items()})
    for name in status.counters:
        text = _COUNTERS.get(name, f"The counter {name}.")
        counter = CounterMetricFamily(f"reducer_{name}", text, labels=["port"])
        for port, lane in lanes.items():
            counter.add_metric([port], lane.counters[name])
        yield counter


def _jobs(status: ReducerStatus) -> Iterator[Metric]:
    labelled: dict[str, JobStatus] = {}
    for job in status.jobs:
        known = labelled.get(job.name)
        if known is not None:
            # Threads that have not met a later generation yet still have the earlier one.
            labelled[job.name] = max(known, job, key=lambda each: each.generation)
        elif len(labelled) < MAX_LABELLED_JOBS:
            labelled[job.name] = job
    about: dict[str, tuple[str, Callable[[JobStatus], int]]] = {
        "generation": ("Version of the membership.", lambda job: job.generation),
        "ranks": ("Ranks of the job.", lambda job: job.world_size),
        "ranks_present": ("Ranks that are connected.", lambda job: job.present),
        "rounds": ("All-reduces in progress.", lambda job: job.rounds),
        "memory_reserved_bytes": ("Bytes set aside.", lambda job: job.reserved),
        "memory_held_bytes": ("Bytes that wait for others.", lambda job: job.held),
    }
    for name, (text, value) in about.items():
        yield _gauge(f"job_{name}", text, "job", {at: value(job) for at, job in labelled.items()})
    yield from _traffic(list(labelled.values()))
    yield from _ranks(list(labelled.values()))


def _traffic(jobs: list[JobStatus]) -> Iterator[Metric]:
    """Yield what each job has moved, and how long its all-reduces took."""
    about: dict[str, tuple[str, Callable[[JobStatus], int]]] = {
        "bytes_in": ("Bytes of contributions taken.", lambda job: job.traffic.bytes_in),
        "bytes_out": ("Bytes of results sent.", lambda job: job.traffic.bytes_out),
    }
    for name, (text, value) in about.items():
        counter = CounterMetricFamily(f"reducer_job_{name}", text, labels=["job"])
        for job in jobs:
            counter.add_metric([job.name], value(job))
        yield counter
    times = HistogramMetricFamily(
        "reducer_job_all_reduce_seconds",
        "From an all-reduce's first contribution to its result; each thread has its part of it.",
        labels=["job"],
    )
    bounds = [*(str(2**octave / 1e6) for octave in OCTAVES), "+Inf"]
    for job in jobs:
        traffic = job.traffic
        buckets = list(zip(bounds, traffic.buckets, strict=True))
        times.add_metric([job.name], buckets, traffic.seconds)
    yield times


def _ranks(jobs: list[JobStatus]) -> Iterator[Metric]:
    """Yield the waits for each job's costliest ranks, and its straggler."""
    labels = ["job", "rank", "cause"]
    waits = CounterMetricFamily(
        "reducer_job_rank_waits", "Waits of the others for this rank alone.", labels=labels
    )
    waited = CounterMetricFamily(
        "reducer_job_rank_waited_seconds", "How long these were.", labels=labels
    )
    straggler = GaugeMetricFamily(
        "reducer_job_straggler_share",
        "Of the time, for how much the others wait for this rank alone, again and again.",
        labels=labels,
    )
    for job in jobs:
        for one in job.costliest_ranks:
            rank = str(one.rank)
            waits.add_metric([job.name, rank, "late"], one.late_waits)
            waits.add_metric([job.name, rank, "slow"], one.slow_waits)
            waited.add_metric([job.name, rank, "late"], one.late_s)
            waited.add_metric([job.name, rank, "slow"], one.slow_s)
        if job.straggler is not None:
            labels = [job.name, str(job.straggler.rank), job.straggler.cause]
            straggler.add_metric(labels, job.straggler.share)
    yield from (waits, waited, straggler)
