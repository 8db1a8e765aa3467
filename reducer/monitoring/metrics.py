"""A reducer's status in Prometheus' text format, with labels that are bounded in number."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args, get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from reducer.engine.rounds import Counters
from reducer.monitoring.status import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from reducer.monitoring.status import JobStatus, ReducerStatus

MAX_LABELLED_JOBS = 32  # those with the most memory; a job's name is a tenant's to choose

_COUNTERS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Counters, include_extras=True).items()
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
        state = GaugeMetricFamily("reducer_state", "1 for the state it is in.", labels=["state"])
        for each in get_args(State):
            state.add_metric([each], float(each == status.state))
        yield state
        yield GaugeMetricFamily("reducer_jobs", "Jobs that are here.", value=status.jobs_total)
        yield from _lanes(status)
        yield from _jobs(status)


def _lanes(status: ReducerStatus) -> Iterator[Metric]:
    lanes = [(str(lane.port), lane) for lane in status.lanes]
    up = GaugeMetricFamily("reducer_lane_up", "1 if this thread answers.", labels=["port"])
    members = GaugeMetricFamily("reducer_members", "Ranks connected.", labels=["port"])
    connections = GaugeMetricFamily("reducer_connections", "Connections.", labels=["port"])
    limit = _memory("limit", "Bytes that jobs may reserve.")
    reserved = _memory("reserved", "Bytes set aside for jobs.")
    held = _memory("held", "Bytes of contributions that wait for others.")
    for port, lane in lanes:
        up.add_metric([port], float(lane.answers))
        if lane.answers:
            members.add_metric([port], lane.members)
            connections.add_metric([port], lane.connections)
            limit.add_metric([port], lane.memory.limit)
            reserved.add_metric([port], lane.memory.reserved)
            held.add_metric([port], lane.memory.held)
    yield from (up, members, connections, limit, reserved, held)
    for name in status.counters:
        about = _COUNTERS.get(name, f"The counter {name}.")
        counter = CounterMetricFamily(f"reducer_{name}", about, labels=["port"])
        for port, lane in lanes:
            if lane.answers:
                counter.add_metric([port], lane.counters[name])
        yield counter


def _memory(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"reducer_memory_{name}_bytes", about, labels=["port"])


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
        gauge = GaugeMetricFamily(f"reducer_job_{name}", text, labels=["job"])
        for job in labelled.values():
            gauge.add_metric([job.name], value(job))
        yield gauge
    yield from _ranks(list(labelled.values()))


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
            its = [job.name, str(job.straggler.rank), job.straggler.cause]
            straggler.add_metric(its, job.straggler.share)
    yield from (waits, waited, straggler)
