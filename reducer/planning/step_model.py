"""What a training step takes, by the way in which gradients are averaged: arithmetic, no clock.

**The model.** A step computes for a time that was measured while nothing was exchanged, and DDP's
buckets are ready at moments of it. They travel one after another. Each keeps the busiest card, or
a rank's processor that casts it and makes its calls, busy while the backward pass goes on; then its
result comes with what `network_model.Times` calls idle. What a step does after its last bucket was
ready waits for all results. DiLoCo exchanges nothing in a step, and all parameters at once in one
of `every`, while nobody computes. Beside that processors cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from reducer.errors import ConfigError
from reducer.planning.network_model import Network, Times, card_times, fastest, ring_times
from reducer.wire.constants import DType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Kind: TypeAlias = Literal["gloo", "reducers", "diloco", "none"]

FLOAT_BYTES = 4
# Of what is rounded, what one thread casts before any of it travels: tensors from here on are cut
# (`worker_client.communicators.casting`).
CAST_AT_ONCE = 8 << 20
AS_GOOD = 0.98  # of a speed: less than anybody would notice
WIRES = {"": None, "bf16": DType.BFLOAT16, "int8": DType.BLOCK8}
# Ways that change more and more of a training, and up to how many times the step with no exchange
# each is good enough to go no further.
_BY_CHANGE: tuple[tuple[Kind, str, float], ...] = (
    ("reducers", "", 1.1),
    ("reducers", "bf16", 1.1),
    ("reducers", "int8", 2.0),
    ("diloco", "int8", math.inf),
)


class Bucket(NamedTuple):
    """One of DDP's buckets.

    Attributes:
        ready_s: when its gradients are there, seconds since the step began.
        nbytes: of its gradients.
        rounded: bytes of those of its float32 gradients that a wire type rounds.
        calls: all-reduces that it takes then; it is one as it is.
    """

    ready_s: float
    nbytes: int
    rounded: int
    calls: int = 1


@dataclass(frozen=True)
class Step:
    """A training step with nothing exchanged, as it was measured.

    Attributes:
        compute_s: all of it.
        backward_s: its backward pass; None if that is not known.
        buckets: in the order in which they are ready, at least one.
        samples: of all ranks; None if that is not known.
    """

    compute_s: float
    buckets: tuple[Bucket, ...]
    backward_s: float | None = None
    samples: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)


class Way(NamedTuple):
    """A way to average gradients.

    Attributes:
        kind: a ring, reducers, outer steps by reducers now and then, or no exchange at all.
        reducers: in the pool; 0: ranks host them.
        wire: what gradients travel as, a name of `WIRES`.
    """

    kind: Kind
    reducers: int = 0
    wire: str = ""


@dataclass(frozen=True)
class TrainingJob:
    """What a step is predicted for.

    Attributes:
        step: as it was measured.
        ranks: all of them, 2 at least.
        nodes: machines that they are on; ranks of one reduce among themselves first.
        network: the nodes' cards, and the reducers'.
        every: steps from one outer step of DiLoCo to the next.
        cast_s: seconds for each byte of float32 that a rank casts to a type and back, by its name.
        outer_s: seconds for each byte of parameters in an outer step, beside the all-reduce.
        call_s: that each of several all-reduces takes a rank, if many are in flight.
    """

    step: Step
    ranks: int
    nodes: int
    network: Network
    every: int = 50
    cast_s: Mapping[str, float] = field(default_factory=dict)
    outer_s: float = 0.0
    call_s: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.ranks < self.nodes:
            raise ConfigError(f"a job has 2 workers at least, got {self.nodes}")
        if self.every < 1:
            raise ConfigError(f"every must be at least 1, got {self.every}")


class Prediction(NamedTuple):
    """What a way takes.

    Attributes:
        all_reduce_s: of all gradients at once, or of all parameters.
        step_s: in the mean.
    """

    way: Way
    all_reduce_s: float
    step_s: float


def last_end_s(buckets: Iterable[tuple[float, Times]]) -> float:
    """Return when the last result is there; each bucket is (when it is ready, what it takes)."""
    free_s = end_s = 0.0
    for ready_s, times in buckets:
        free_s = max(free_s, ready_s) + times.busy_s
        end_s = max(end_s, free_s + times.idle_s)
    return end_s


def predict(job: TrainingJob, way: Way) -> Prediction:
    """Return what a way takes."""
    step = job.step
    if way.kind == "none":
        return Prediction(way, 0.0, step.compute_s)
    rounded = sum(bucket.rounded for bucket in step.buckets)
    calls = 1 if way.kind == "diloco" else sum(bucket.calls for bucket in step.buckets)
    whole = sum(_times(job, way, Bucket(0.0, step.nbytes, rounded, calls)))
    if way.kind == "diloco":
        outer_s = whole + job.outer_s * step.nbytes
        return Prediction(way, whole, step.compute_s + outer_s / job.every)
    ready_s = step.buckets[-1].ready_s
    end_s = last_end_s((bucket.ready_s, _times(job, way, bucket)) for bucket in step.buckets)
    return Prediction(way, whole, max(ready_s, end_s) + step.compute_s - ready_s)


def ways(pools: Sequence[int]) -> list[Way]:
    """Return what is worth comparing: a ring first, no exchange last, rounding after exact sums."""
    found = [Way("gloo")]
    for pool in (0, *pools):
        wires = WIRES if pool in {0, *pools[-1:]} else {"": None}
        found += [Way("reducers", pool, wire) for wire in wires]
    outer = [Way("diloco", pool, "int8") for pool in sorted({0, *pools[-1:]})]
    return [*found, *outer, Way("none")]


def advised(found: Sequence[Prediction]) -> Prediction:
    """Return what to take: the ring, unless that loses; else what changes least and gains enough.

    Exact sums come first, by the ranks' own reducers or by a pool as small as does nearly as well;
    then 16 bits, 8, and outer steps.
    """
    (none,) = (one for one in found if one.way.kind == "none")
    ring, chosen = found[0], none
    for kind, wire, enough in _BY_CHANGE:
        alike = [one for one in found if (one.way.kind, one.way.wire) == (kind, wire)]
        best_s = min(one.step_s for one in alike)
        if best_s <= enough * none.step_s:
            chosen = next(one for one in alike if one.step_s <= best_s / AS_GOOD)
            break
    return ring if ring.step_s <= chosen.step_s / AS_GOOD else chosen


def _times(job: TrainingJob, way: Way, bucket: Bucket) -> Times:
    if way.kind == "gloo":
        return ring_times(bucket.nbytes, job.ranks, job.network)
    wire = WIRES[way.wire]
    rounded = bucket.rounded if wire is not None else 0
    nbytes = bucket.nbytes - rounded
    processor_s = at_once_s = 0.0
    if wire is not None and rounded:
        nbytes += wire.nbytes(rounded // FLOAT_BYTES)
        cast_s = rounded * job.cast_s.get(way.wire, 0.0)
        at_once_s = cast_s * min(1.0, CAST_AT_ONCE / rounded)
        processor_s = cast_s + bucket.calls * job.call_s
    _, topology = fastest(nbytes, job.nodes, way.reducers, job.network)
    times = card_times(nbytes, job.nodes, way.reducers, topology, job.network)
    return Times(max(times.busy_s, processor_s), times.idle_s + at_once_s)
