"""Buffer -> shards -> chunks: pure arithmetic that every rank must do alike (`README.md`, 7)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from reducer.wire.constants import MIN_CHARGE, SHARD_ALIGNMENT

AUTO_CHUNK_STEP = 64 << 10
AUTO_CHUNK_LIMIT = 1 << 20
AUTO_IN_FLIGHT = 16 << 20  # bytes within which two chunks per reducer should fit


class Range(NamedTuple):
    """A part of a buffer that travels over one link, in chunks.

    Attributes:
        link: index of the reducer that owns it.
        start, end: within the buffer, bytes.
    """

    link: int
    start: int
    end: int


def shards(total_bytes: int, reducers: int) -> list[tuple[int, int]]:
    """Cut a buffer into one equal slice per reducer.

    Args:
        total_bytes: size of the buffer.
        reducers: number of reducers, at least 1.

    Returns:
        ``(start, end)`` in bytes per reducer. Boundaries are multiples of 64 bytes, so sizes differ
        by at most 64 (but for the buffer's end). Reducer 0 owns the first byte.
    """
    units = -(-total_bytes // SHARD_ALIGNMENT)
    bounds = [
        min(total_bytes, SHARD_ALIGNMENT * -(-units * index // reducers))
        for index in range(reducers + 1)
    ]
    return list(pairwise(bounds))


def auto_chunk_bytes(total_bytes: int, reducers: int) -> int:
    """Return the chunk size used where none is forced.

    A quarter of a shard keeps sending, reducing and receiving busy at the same time; below 64 KiB
    the cost per message rules, above `auto_chunk_limit` nothing is gained and memory is lost.
    """
    quarter = -(-total_bytes // (4 * reducers))
    steps = max(1, -(-quarter // AUTO_CHUNK_STEP))
    return min(auto_chunk_limit(reducers), steps * AUTO_CHUNK_STEP)


def auto_chunk_limit(reducers: int) -> int:
    """Return the largest chunk that the rule chooses: 1 MiB, less where reducers are many."""
    steps = AUTO_IN_FLIGHT // (2 * reducers) // AUTO_CHUNK_STEP
    return min(AUTO_CHUNK_LIMIT, max(1, steps) * AUTO_CHUNK_STEP)


def ranges(total_bytes: int, reducers: int) -> list[Range]:
    """Say which part of a buffer travels over which link, in ascending order.

    Args:
        total_bytes: size of the buffer; 0 gives one empty range, so that disagreement shows.
        reducers: number of reducers, at least 1.
    """
    cut = (Range(link, *shard) for link, shard in enumerate(shards(total_bytes, reducers)))
    return [range_ for range_ in cut if range_.start < range_.end] or [Range(0, 0, 0)]


def charge(nbytes: int) -> int:
    """Return what a contribution of `nbytes` takes of a window while it is in flight, in bytes."""
    return max(nbytes, MIN_CHARGE)
