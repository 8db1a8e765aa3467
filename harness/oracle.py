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

    If it is `exact`, every bit counts: the sum is the left fold in rank order, in fp32, of what is
    rounded to `wire_dtype`. Otherwise an element may be off by ``world_size * eps *
    sum(|contributions|)`` (eps = 2^-23), which covers every order of additions.
    """
    if exact:
        # What values are rounded to in blocks depends on where these lie, and so has no period.
        period = result.size if wire_dtype in block8_oracle.Q else PERIOD
        expected = _left_fold(world_size, wire_dtype, period).view(np.uint32)
        return sum(
            int(np.count_nonzero(part.view(np.uint32) != expected[: part.size]))
            for part in _parts(result, period)
        )
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
    total = through(contribution(0, count), wire_dtype)
    for rank in range(1, world_size):
        total += through(contribution(rank, count), wire_dtype)
    return through(total, wire_dtype, dithered=True)


def widen(values: Any, dtype: str) -> Any:
    """Return values in the type in which they are folded: 16 bits in float32."""
    if dtype == "bfloat16":  # NumPy has none: these are its bits
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32) if dtype == "float16" else values


def half(values: Array, dtype: str) -> Any:
    """Round float32 to nearest and ties to even, of bfloat16 its bits, with one NaN alone."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        kept = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), kept)
    found = values.astype(np.float16)
    found[np.isnan(found)] = np.nan
    return found


def through(values: Array, wire_dtype: str, *, dithered: bool = False) -> Array:
    """Round float32 values to what travels, as reducers do if dithered; return it as float32."""
    if not wire_dtype:
        return values
    if wire_dtype in block8_oracle.Q:
        sent = block8_oracle.travels(values, wire_dtype, dithered=dithered)
        return block8_oracle.arrives(sent, values.size, wire_dtype)
    dtype = "bfloat16" if wire_dtype == "bf16" else "float16"
    rounded: Array = widen(half(values, dtype), dtype)
    return rounded


@lru_cache(maxsize=1)
def _total(world_size: int) -> tuple[np.ndarray[Any, np.dtype[np.float64]], Array]:
    total = np.zeros(PERIOD)
    magnitude = np.zeros(PERIOD)
    for rank in range(world_size):
        total += _tile(rank)
        magnitude += abs(_tile(rank))
    return total, (world_size * EPSILON * magnitude).astype(np.float32)
