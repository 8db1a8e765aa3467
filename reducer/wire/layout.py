"""Buffer -> shards -> chunks: arithmetic that every rank must do alike (`docs/protocol.md`, 8)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.constants import MIN_COST, PLACES, SHARD_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_SHARD = 32 << 10  # bytes; a smaller one costs more in messages than it saves in time
SMALLEST_CHUNK = 64 << 10
LARGEST_CHUNK = 256 << 10  # more of it leaves the caches before it is summed
# What a chunk should take on the link, at most. So links of 1, 2.5, 5 and 10 Gbit/s are far from
# the rates at which chunks double: what is measured may be a seventh more than a link carries.
CHUNK_S = 0.0007
MEASURED_BYTES = 1 << 20  # a shorter all-reduce says nothing about what a link can carry
MANY_CHUNKS = 8  # of a shard: its first and its last ones, when a link rests, cost it little


class Shard(NamedTuple):
    """The part of a buffer that one reducer owns.

    Attributes:
        reducer: its index among the job's reducers.
        start, end: within the buffer, bytes.
    """

    reducer: int
    start: int
    end: int


def shards(
    total_bytes: int,
    weights: Sequence[int],
    sequence: int,
    chunk_bytes: int = 0,
    itemsize: int = 1,
) -> list[Shard]:
    """Cut the buffer of an all-reduce into shards.

    The first shard goes to another reducer with every all-reduce, so that small buffers, which few
    reducers share, burden all of them alike. Ranks agree on that reducer whatever else they
    disagree on, so it is the one that notices.

    Args:
        total_bytes: size of the buffer; 0 gives one empty shard, so that disagreement shows.
        weights: what each reducer is to own, relative to the others; not all zero.
        sequence: number of the all-reduce.
        chunk_bytes: the forced size of chunks, 0 for the rule.
        itemsize: bytes of an element.

    Returns:
        Adjoining shards in ascending order, their bounds multiples of 64 bytes, and of an element's
        where that has more, but for the end.
    """
    owners = [reducer for reducer, weight in enumerate(weights) if weight]
    turn = turn_of(sequence) % len(owners)
    owners = owners[turn:] + owners[:turn]
    shares = [weights[owner] for owner in owners]
    smallest = min(chunk_bytes or MIN_SHARD, MIN_SHARD)
    most = max(1, -(-total_bytes // smallest))
    if most < len(owners):
        owners, shares = owners[:most], [1] * most
    alignment = max(SHARD_ALIGNMENT, itemsize)
    units = -(-total_bytes // alignment)
    whole = sum(shares)
    bounds = [
        min(total_bytes, alignment * -(-units * share // whole))
        for share in accumulate(shares, initial=0)
    ]
    cut = [Shard(owner, *bound) for owner, bound in zip(owners, pairwise(bounds), strict=True)]
    return [shard for shard in cut if shard.end > shard.start] or cut[:1]


def turn_of(sequence: int) -> int:
    """Return how many places on, among reducers, the first shard of an all-reduce belongs."""
    call, place = divmod(sequence, PLACES)
    return call + place - 1 if place else call


def mixed_weights(workers: int, pool: int) -> tuple[int, ...]:
    """Return what each reducer should own if every worker hosts one besides the pool's.

    With n workers, k < n reducers in the pool and equal links, each of the pool's owns
    2(n-1)/(n*n+kn-2k) of a buffer and each worker's (n-k)/(n*n+kn-2k): then all links are busy to
    the end (Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
    Heterogeneous GPU/CPU Clusters", OSDI 2020).

    Args:
        workers: number of workers, n.
        pool: number of reducers in the pool, k; with 0 all shares are equal.

    Returns:
        Weights, first of the pool's reducers, then of the workers'.
    """
    if workers == 1 or pool >= workers:
        return (1,) * pool + (0 if pool else 1,) * workers
    return (2 * (workers - 1),) * pool + (workers - pool,) * workers


def chunk_size(rate: float) -> int:
    """Return what a link carries in `CHUNK_S`, in bytes: the measure of chunks.

    A large chunk costs less per byte, but nothing of it comes back before all of it has arrived
    from every rank.

    Args:
        rate: what the slowest worker's links carry, bytes per second; 0 if that is not known yet.
    """
    return max(SMALLEST_CHUNK, _power_of_two(rate * CHUNK_S))


def chunk_size_of(total_bytes: int, shard_count: int, measure: int) -> int:
    """Return the size of the chunks of one buffer, in bytes.

    Args:
        total_bytes: of the buffer.
        shard_count: how many reducers share it.
        measure: what `chunk_size` says.
    """
    short = total_bytes < shard_count * MANY_CHUNKS * measure
    return min(LARGEST_CHUNK, measure // 2 if short else measure)


def _power_of_two(value: float) -> int:
    """Return the largest power of two that is not above a value of at least 1."""
    return 1 << (int(value).bit_length() - 1) if value >= 1 else 1


def cost(nbytes: int) -> int:
    """Return what a contribution of `nbytes` takes of a window while it is in flight, in bytes."""
    return max(nbytes, MIN_COST)
