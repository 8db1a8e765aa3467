"""BLOCK8 in NumPy: blocks of 252 values with one scale (`reducer/wire/README.md`, section 4)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from reducer.wire.constants import BLOCK_VALUES

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

ELEMENT = np.dtype([("scale", "<f4"), ("q", "i1", BLOCK_VALUES)])
_LARGEST_Q = np.float32(127)
_SMALLEST = np.float32(2.0**-100)  # below it all is zero, so that 127 / m is finite


_PLACES = np.arange(4, 256, dtype=np.uint32) * np.uint32(0x9E3779B1)  # of q's bytes, mixed


def values_of(blocks: Array) -> Array:
    """Return the values of blocks, float32, one row for each block."""
    values: Array = blocks["scale"][:, np.newaxis] * blocks["q"].astype(np.float32)
    return values


def rounded(values: Array, *, dithered: bool = False) -> Array:
    """Round float32 values to blocks, one for each row of 252: to nearest, or dithered."""
    largest = np.abs(values).max(axis=1)
    is_finite = np.isfinite(largest)
    is_usual = is_finite & (largest >= _SMALLEST)
    m = np.where(is_usual, largest, np.float32(1))
    steps = values * (_LARGEST_Q / m)[:, np.newaxis]
    if dithered:
        steps += _dither(values)
    q = np.rint(steps)
    blocks = np.empty(len(values), ELEMENT)
    blocks["scale"] = np.where(is_usual, m / _LARGEST_Q, np.where(is_finite, 0, np.nan))
    blocks["q"] = np.where(is_usual[:, np.newaxis], q, 0)
    return blocks


def _dither(values: Array) -> Array:
    """Return what is added to each value in steps, between -1/2 and 1/2 (`block8.h` says more)."""
    mixed = (values.view(np.uint32) ^ _PLACES) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE35)
    steps: Array = (mixed >> np.uint32(20)).astype(np.float32) - np.float32(2047.5)
    return steps * np.float32(2.0**-12)
