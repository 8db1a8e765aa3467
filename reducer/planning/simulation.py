"""What `reducer plan --simulate` answers: one all-reduce of a job, simulated by the real rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.planning.network_model import (
    MTU,
    Network,
    Topology,
    busiest_card_s,
    card_times,
    payload_share,
    shares,
)
from reducer.planning.simulated_job import ContributionCounter, MessageCosts, SimulatedJob
from reducer.planning.virtual_network import SEGMENT_BYTES, LinkRate
from reducer.wire.layout import MIN_SHARD, chunk_size, chunk_size_of, mixed_weights
from worker_client.protocol.flow_control import window_limit
from worker_client.protocol.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable


SETTLING_CALLS = 3  # with the third, ranks have agreed on chunks, and windows are measured
MEASURED_CALLS = 4
MANY_LINKS = 1 << 12  # from so many on what ranks agree on is computed, and one call is measured


@dataclass(frozen=True)
class SimulationScenario:
    """What is simulated.

    Attributes:
        workers: ranks, each on a host of its own.
        reducers: of the pool; 0 if embedded.
        topology: where reducers are; one of `network_model.Topology`.
        nbytes: of the buffer.
        worker_gbps, reducer_gbps: rates of the cards, Gbit/s each way.
        delay_s: from one host to another, one way.
        port_buffer_bytes: of each port of the switch; 0: nothing is ever lost.
        burst_bytes: by which links catch up after a rest, as the lab's do.
        mtu: largest packet, bytes.
        lanes: threads of each reducer.
        streams: connections of each link; 0 for the rule.
        segment_bytes: the most that a card takes of a connection at once.
        chunk_bytes: forced size of chunks, 0 for the rule.
        costs: of messages.
    """

    workers: int
    reducers: int
    topology: Topology
    nbytes: int
    worker_gbps: float
    reducer_gbps: float
    delay_s: float = 0.0001
    port_buffer_bytes: int = 0
    burst_bytes: int = 0
    mtu: int = MTU
    lanes: int = 1
    streams: int = 0
    segment_bytes: int = SEGMENT_BYTES
    chunk_bytes: int = 0
    costs: MessageCosts = field(default_factory=MessageCosts)

    @property
    def network(self) -> Network:
        """The cards, as payload that they carry."""
        share = payload_share(self.mtu) * 1e9 / 8
        return Network(self.worker_gbps * share, self.reducer_gbps * share, 2 * self.delay_s)

    @property
    def formula_s(self) -> float:
        """What `card_times` says of it, less what the links catch up."""
        times = card_times(self.nbytes, self.workers, self.reducers, self.topology, self.network)
        caught_up = self.burst_bytes / self.network.worker_rate
        return times.busy_s + max(0.0, times.idle_s - caught_up)


class _SettledSpec(JobSpec):
    """A job whose chunks have the size that its ranks agree on; all else is as without that."""

    def window_per_reducer(self) -> int:
        """Return what is asked for where the size of chunks is not forced."""
        return window_limit(0, 0, len(self.reducers))


@dataclass(frozen=True)
class SimulationOutcome:
    """The times, queues and costs of a simulated all-reduce.

    Attributes:
        seconds: of an all-reduce, from the end of the one before at the last rank.
        formula_s: what `network_model.card_times` says.
        goodput_gbps: of the buffer's bits, over the time.
        busiest_gbps: of payload over the busiest link, one way.
        reducer_port_bytes, worker_port_bytes: the longest queues at the switch, to a host with a
            reducer of the pool and to one with a rank.
        lost_share: of what all links carry, how much found no room there.
        chunk_bytes: of the largest chunks.
        window_bytes: of the largest window, when all was over.
        worker_cpu_s_per_gb: processor time of one rank for each GB of its buffer.
        reducers_cpu_s_per_gb: of all reducers together.
        events: that were simulated.
    """

    seconds: float
    formula_s: float
    goodput_gbps: float
    busiest_gbps: float
    reducer_port_bytes: int
    worker_port_bytes: int
    lost_share: float
    chunk_bytes: int
    window_bytes: int
    worker_cpu_s_per_gb: float
    reducers_cpu_s_per_gb: float
    events: int


def simulate(
    scenario: SimulationScenario, rules: Callable[[int], ContributionCounter] = ContributionCounter
) -> SimulationOutcome:
    """Simulate a job's all-reduces, and return what one takes when ranks have agreed on all.

    Args:
        scenario: what is simulated.
        rules: makes what decides for a reducer, given the number of ranks; tests have others.

    Raises:
        ConfigError: there is no such topology with so many reducers.
    """
    specs = job_specs(scenario)
    settled = isinstance(specs[0], _SettledSpec)
    rates = scenario.network
    burst = scenario.burst_bytes
    job = SimulatedJob(
        specs,
        (LinkRate(rates.worker_rate, burst), LinkRate(rates.reducer_rate, burst)),
        delay_s=scenario.delay_s,
        buffer_bytes=scenario.port_buffer_bytes,
        segment_bytes=scenario.segment_bytes,
        costs=scenario.costs,
        rules=rules,
    )
    settling, measured = (1, 1) if settled else (SETTLING_CALLS, MEASURED_CALLS)
    job.run(scenario.nbytes, settling + measured)
    first, last = job.usages[settling - 1], job.usages[-1]
    elapsed = last.at_s - first.at_s
    carried = zip(first.carried, last.carried, strict=True)
    nbytes = scenario.nbytes * measured
    session, to_pool = job.workers[0].session, [site.port for site in job.pool]
    to_ranks = [site.port for site in job.ranks]
    lost = sum(port.lost for port in to_pool + to_ranks)
    return SimulationOutcome(
        seconds=elapsed / measured,
        formula_s=scenario.formula_s,
        goodput_gbps=8e-9 * nbytes / elapsed,
        busiest_gbps=8e-9 * max(later - before for before, later in carried) / elapsed,
        reducer_port_bytes=max((port.deepest for port in to_pool), default=0),
        worker_port_bytes=max(port.deepest for port in to_ranks),
        lost_share=lost / sum(last.carried),
        chunk_bytes=job.workers[0].largest_chunk,
        window_bytes=max(session.flight.stats(link.index).window for link in session.links),
        worker_cpu_s_per_gb=1e9 * (last.worker_s - first.worker_s) / nbytes / scenario.workers,
        reducers_cpu_s_per_gb=1e9 * (last.reducers_s - first.reducers_s) / nbytes,
        events=job.clock.events,
    )


def job_specs(scenario: SimulationScenario) -> list[JobSpec]:
    """Return what the ranks of a scenario know."""
    n, k = scenario.workers, scenario.reducers
    shares(n, k, scenario.topology)  # which says what is wrong
    pool = 0 if scenario.topology == "embedded" else k
    hosted = 0 if scenario.topology == "pool" else n
    addresses = tuple(f"reducer-{index}:1" for index in range(pool + hosted))
    chunk_bytes, kind = scenario.chunk_bytes, JobSpec
    if not chunk_bytes and pool and n * (pool + hosted) * scenario.lanes >= MANY_LINKS:
        chunk_bytes, kind = agreed_chunk_bytes(scenario), _SettledSpec
    return [
        kind(
            job="simulated",
            generation=0,
            rank=rank,
            world_size=n,
            reducers=addresses,
            window_bytes=0,
            chunk_bytes=chunk_bytes,
            streams=scenario.streams,
            lanes={
                index: tuple(f"reducer-{index}:{port}" for port in range(2, scenario.lanes + 1))
                for index in range(pool + hosted)
            },
            weights=mixed_weights(n, pool) if pool and hosted else (),
            hosts={pool + rank: rank for rank in range(hosted)},
        )
        for rank in range(n)
    ]


def agreed_chunk_bytes(scenario: SimulationScenario) -> int:
    """Return the size of chunks that ranks agree on when they have measured the cards."""
    pool, network = scenario.reducers, scenario.network
    owned = shares(scenario.workers, pool, scenario.topology)
    rate = 1 / busiest_card_s(scenario.workers, owned, network)
    links = pool * scenario.lanes + (scenario.workers if scenario.topology == "mixed" else 0)
    shard_count = max(1, min(links, -(-scenario.nbytes // MIN_SHARD)))
    return chunk_size_of(scenario.nbytes, shard_count, chunk_size(rate))
