"""How many reducers a job should have, and what they gain: arithmetic on links, nothing measured.

`reducer.planning.network_model` has the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.planning.network_model import (
    MTU,
    PACKET_HEADERS,
    Network,
    Times,
    Topology,
    all_reduce_s,
    fastest,
    payload_share,
    ring_s,
    shares,
)
from reducer.planning.step_model import last_end_s
from reducer.wire.constants import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection

BUCKET_BYTES = 64 << 20  # `worker_client.ddp.DEFAULT_BUCKET_CAP_MB`


@dataclass(frozen=True)
class PlannedJob:
    """What is to be planned.

    Attributes:
        workers: machines with one network card each, n.
        worker_gbps, reducer_gbps: rates of the cards, Gbit/s each way.
        nbytes: of all gradients.
        backward_s: the backward pass, in which gradients come up evenly; 0 if nothing overlaps.
        forward_s: what else a step takes: forward pass, optimizer, data.
        bucket_bytes: DDP's buckets.
        round_trip_s: between a worker and a reducer.
        mtu: largest packet, bytes.
        worker_cost, reducer_cost: of one machine per hour, in any currency; None if unknown.
    """

    workers: int
    worker_gbps: float
    reducer_gbps: float
    nbytes: int
    backward_s: float = 0.0
    forward_s: float = 0.0
    bucket_bytes: int = BUCKET_BYTES
    round_trip_s: float = 0.0002
    mtu: int = MTU
    worker_cost: float | None = None
    reducer_cost: float | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be from {least:g} to {most:g}, got {value}")

    @property
    def network(self) -> Network:
        """The cards, as payload that they carry."""
        share = payload_share(self.mtu) * 1e9 / 8
        return Network(self.worker_gbps * share, self.reducer_gbps * share, self.round_trip_s)


# Beyond these, figures would be no numbers, or need more memory than there is.
_BOUNDS = {
    "workers": (2, MAX_WORLD_SIZE),
    "worker_gbps": (1e-3, 1e6),
    "reducer_gbps": (1e-3, 1e6),
    "nbytes": (1, 1e18),
    "bucket_bytes": (1, 1e18),
    "backward_s": (0, 1e9),
    "forward_s": (0, 1e9),
    "round_trip_s": (0, 1e9),
    "mtu": (PACKET_HEADERS + 1, 65536),
    "worker_cost": (0, 1e9),
    "reducer_cost": (0, 1e9),
}
_MOST_REDUCERS = 10**6


@dataclass(frozen=True)
class Row:
    """A pool of one size, against a ring of the same workers.

    Attributes:
        reducers: in the pool, k.
        topology: the fastest that k allows.
        pool_share, rank_share: as of `Shares`.
        all_reduce_s: of all gradients at once.
        speedup: the ring's time over it.
        step_s, step_speedup: likewise, of a training step.
        cost_per_hour: of all machines.
        cost_saved: part of what a step costs with a ring, 0 to 1; negative if it costs more.
        hours_gained_per_cost: hours of training with a ring that one unit of money for reducers
            stands for.
    """

    reducers: int
    topology: Topology
    pool_share: float
    rank_share: float
    all_reduce_s: float
    speedup: float
    step_s: float
    step_speedup: float
    cost_per_hour: float | None
    cost_saved: float | None
    hours_gained_per_cost: float | None


@dataclass(frozen=True)
class PoolPlan:
    """The answer.

    Attributes:
        reducers_needed: by the rule of `reducers_needed`.
        ring_s, ring_step_s: a ring's all-reduce, and a step with it.
        rows: one for each size of the pool that was asked for.
    """

    reducers_needed: int
    ring_s: float
    ring_step_s: float
    rows: tuple[Row, ...]


def reducers_needed(workers: int, worker_gbps: float, reducer_gbps: float) -> int:
    """Return the smallest pool whose total bandwidth is at least that of all workers.

    More gain nothing: then the workers' own cards are the limit. It is the rule of Vertex AI's
    documents on its Reduction Server: 8 workers with 100 Gbit/s need 25 reducers with 32.
    """
    # As the decimal numbers that were written: binary ones would make 3 * 0.1 / 0.1 more than 3.
    total = workers * Fraction(str(worker_gbps))
    return math.ceil(total / Fraction(str(reducer_gbps)))


def step_s(job: PlannedJob, all_s: float, last_s: float) -> float:
    """Return the time of a training step.

    DDP's buckets travel while the backward pass makes the next ones. The step ends with the last
    bucket, which cannot leave before the backward pass is over, or, if the network is the limit,
    when all have travelled one after the other since the first was there.

    Args:
        job: what is planned.
        all_s: time to all-reduce all gradients.
        last_s: that of the last bucket alone.
    """
    # Of buckets that come up evenly the first or the last one decides.
    others = (job.backward_s / buckets(job), Times(all_s - last_s, 0.0))
    return job.forward_s + last_end_s((others, (job.backward_s, Times(last_s, 0.0))))


def buckets(job: PlannedJob) -> int:
    """Return the number of DDP's buckets."""
    return math.ceil(job.nbytes / job.bucket_bytes)


def plan(job: PlannedJob, pools: Collection[int] = ()) -> PoolPlan:
    """Plan a job.

    Args:
        job: its workers, links, gradients and costs.
        pools: sizes of the pool to compare; none for powers of two up to the number needed.

    Raises:
        ConfigError: a size is negative, or beyond all reason.
    """
    needed = reducers_needed(job.workers, job.worker_gbps, job.reducer_gbps)
    sizes = sorted(set(pools)) or default_sizes(needed)
    for size in sizes if pools else ():
        if not 0 <= size <= _MOST_REDUCERS:
            raise ConfigError(f"a pool has 0 to {_MOST_REDUCERS} reducers, got {size}")
    network, bucket = job.network, job.nbytes / buckets(job)
    ring = ring_s(job.nbytes, job.workers, network)
    ring_step = step_s(job, ring, ring_s(bucket, job.workers, network))
    rows = tuple(_row(job, size, ring, ring_step) for size in sizes)
    return PoolPlan(needed, ring, ring_step, rows)


def default_sizes(needed: int) -> list[int]:
    """Return 0, the powers of two below the number needed, and that itself."""
    return [0, *(1 << power for power in range((needed - 1).bit_length())), needed]


def _row(job: PlannedJob, reducers: int, ring: float, ring_step: float) -> Row:
    network, n = job.network, job.workers
    seconds, topology = fastest(job.nbytes, n, reducers, network)
    bucket = all_reduce_s(job.nbytes / buckets(job), n, reducers, topology, network)
    step = step_s(job, seconds, bucket)
    owned = shares(n, reducers, topology)
    pool_cost = None if job.reducer_cost is None else reducers * job.reducer_cost
    ring_cost = None if job.worker_cost is None else n * job.worker_cost
    cost = None if pool_cost is None or ring_cost is None else ring_cost + pool_cost
    return Row(
        reducers=reducers,
        topology=topology,
        pool_share=float(owned.pool),
        rank_share=float(owned.ranks),
        all_reduce_s=seconds,
        speedup=ring / seconds,
        step_s=step,
        step_speedup=ring_step / step,
        cost_per_hour=cost,
        cost_saved=1 - cost * step / (ring_cost * ring_step) if cost and ring_cost else None,
        hours_gained_per_cost=(ring_step / step - 1) / pool_cost if pool_cost else None,
    )
