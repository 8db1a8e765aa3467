"""What every rank contributes, and what the sum of all must be, element for element.

The values repeat with a period that is a prime number of elements, so that no chunk, shard or
segment is like another one: a result in the wrong place is a wrong result.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from harness import block8_oracle

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

PERIOD = 1_048_573  # elements, 4 MiB: small enough to compare with from the cache
EPSILON = float(np.finfo(np.float32).eps)


def contribution(rank: int, count: int) -> Array:
    """Return the `count` fp32 values that a rank brings to every checked all-reduce."""
    return np.resize(_tile(rank), count)


def wrong(result: Array, world_size: int, *, exact: bool, wire_dtype: str = "") -> int:
    """Count the elements of a sum over all ranks that are not what they must be.

    Args:
        result: what a rank ended with.
        world_size: number of ranks.
        exact: whether every bit counts: the sum is then the left fold in rank order, in fp32.
            Otherwise an element may be off by ``world_size * eps * sum(|contributions|)`` (eps =
            2^-23), which covers every order of additions.
        wire_dtype: ``bf16``, ``fp16``, ``int8`` or ``fp8_e4m3`` if contributions and the exact sum
            are rounded to that.
    """
    if exact:
        return wrong_bits(result, world_size, wire_dtype)
    return wrong_values(result, world_size)


def wrong_bits(result: Array, world_size: int, wire_dtype: str = "") -> int:
    """Count the elements that differ in any bit from the left fold in rank order."""
    # What values are rounded to in blocks depends on where these lie, and so has no period.
    period = result.size if wire_dtype in block8_oracle.Q else PERIOD
    expected = _left_fold(world_size, wire_dtype, period).view(np.uint32)
    return sum(
        int(np.count_nonzero(part.view(np.uint32) != expected[: part.size]))
        for part in _parts(result, period)
    )


def wrong_values(result: Array, world_size: int) -> int:
    """Count the elements that no order of additions can explain."""
    total, bound = _total(world_size)
    # A NaN compares false, and so counts.
    return sum(
        part.size - int(np.count_nonzero(abs(part - total[: part.size]) <= bound[: part.size]))
        for part in _parts(result, PERIOD)
    )


def _parts(result: Array, period: int) -> Iterator[Array]:
    return (result[start : start + period] for start in range(0, result.size, period or 1))


def _tile(rank: int) -> Array:
    return np.random.default_rng(rank).standard_normal(PERIOD, dtype=np.float32)


@lru_cache(maxsize=1)
def _left_fold(world_size: int, wire_dtype: str, count: int) -> Array:
    total = _rounded(contribution(0, count), wire_dtype)
    for rank in range(1, world_size):
        total += _rounded(contribution(rank, count), wire_dtype)
    if wire_dtype in block8_oracle.Q:
        sent = block8_oracle.travels(total, wire_dtype, dithered=True)
        return block8_oracle.arrives(sent, total.size, wire_dtype)
    return _rounded(total, wire_dtype)


def _rounded(finite: Array, wire_dtype: str) -> Array:
    """Round to the nearest value of the type on the wire, of two the one with an even last bit."""
    if not wire_dtype:
        return finite
    if wire_dtype in block8_oracle.Q:
        sent = block8_oracle.travels(finite, wire_dtype)
        return block8_oracle.arrives(sent, finite.size, wire_dtype)
    if wire_dtype == "fp16":
        return finite.astype(np.float16).astype(np.float32)
    bits = finite.view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return bits.view(np.float32)


@lru_cache(maxsize=1)
def _total(world_size: int) -> tuple[np.ndarray[Any, np.dtype[np.float64]], Array]:
    total = np.zeros(PERIOD)
    magnitude = np.zeros(PERIOD)
    for rank in range(world_size):
        total += _tile(rank)
        magnitude += abs(_tile(rank))
    return total, (world_size * EPSILON * magnitude).astype(np.float32)
