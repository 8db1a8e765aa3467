"""Buffer -> shards -> chunks: pure arithmetic that every rank must do alike (`README.md`, 7)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.constants import MIN_CHARGE, SHARD_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

AUTO_CHUNK_STEP = 64 << 10
AUTO_CHUNK_LIMIT = 1 << 20
AUTO_IN_FLIGHT = 16 << 20  # bytes within which two chunks per reducer should fit


class Chunk(NamedTuple):
    """The unit on the wire and of one reduction.

    Attributes:
        reducer: index of the reducer that owns it.
        offset: start within the buffer, bytes.
        nbytes: size, bytes.
    """

    reducer: int
    offset: int
    nbytes: int


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


def chunks(total_bytes: int, reducers: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a buffer into the chunks that travel, in ascending order.

    Args:
        total_bytes: size of the buffer; 0 gives one empty chunk, so that disagreement shows.
        reducers: number of reducers, at least 1.
        chunk_bytes: size of every chunk but a shard's last, a positive multiple of 64.
    """
    if total_bytes == 0:
        yield Chunk(0, 0, 0)
    for reducer, (start, end) in enumerate(shards(total_bytes, reducers)):
        for offset in range(start, end, chunk_bytes):
            yield Chunk(reducer, offset, min(chunk_bytes, end - offset))


def charge(nbytes: int) -> int:
    """Return what a contribution of `nbytes` takes of a window while it is in flight, in bytes."""
    return max(nbytes, MIN_CHARGE)
