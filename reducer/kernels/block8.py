"""BLOCK8 in NumPy: blocks of 252 values with one scale (`reducer/wire/README.md`, section 4)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from reducer.wire.constants import BLOCK_VALUES

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

ELEMENT = np.dtype([("scale", "<f4"), ("q", "i1", BLOCK_VALUES)])
_LARGEST_Q = np.float32(127)
_SMALLEST = np.float32(2.0**-100)  # below it all is zero, so that 127 / m is finite


def values_of(blocks: Array) -> Array:
    """Return the values of blocks, float32, one row for each block."""
    values: Array = blocks["scale"][:, np.newaxis] * blocks["q"].astype(np.float32)
    return values


def rounded(values: Array) -> Array:
    """Round float32 values to blocks, one for each row of 252."""
    largest = np.abs(values).max(axis=1)
    is_finite = np.isfinite(largest)
    is_usual = is_finite & (largest >= _SMALLEST)
    m = np.where(is_usual, largest, np.float32(1))
    q = np.rint(values * (_LARGEST_Q / m)[:, np.newaxis])
    blocks = np.empty(len(values), ELEMENT)
    blocks["scale"] = np.where(is_usual, m / _LARGEST_Q, np.where(is_finite, 0, np.nan))
    blocks["q"] = np.where(is_usual[:, np.newaxis], q, 0)
    return blocks
