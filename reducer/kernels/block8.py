"""Blocks of 252 values with one scale, in NumPy (`docs/protocol.md`, section 4)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from reducer.wire.constants import BLOCK_VALUES, DType

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

ELEMENT = np.dtype([("scale", "<f4"), ("q", "i1", BLOCK_VALUES)])  # of both types; E4M3 has bits
_LARGEST_Q = {DType.BLOCK8: np.float32(127), DType.BLOCK8_E4M3: np.float32(448)}
_SMALLEST = np.float32(2.0**-100)  # below it all is zero, so that L / m is finite

_PLACES = np.arange(4, 256, dtype=np.uint32) * np.uint32(0x9E3779B1)  # of q's bytes, mixed


def _e4m3() -> Array:
    """Return the number that each byte of E4M3 stands for."""
    bits = np.arange(128)
    exponents, mantissas = bits >> 3, bits & 7
    numbers = np.ldexp(mantissas + 8.0 * (exponents > 0), np.maximum(exponents, 1) - 10)
    numbers[127] = np.nan
    return np.concatenate([numbers, -numbers]).astype(np.float32)


_E4M3 = _e4m3()
_E4M3_SMALL = 121  # the exponent's bits of 2^-6, below which steps become no smaller


def values_of(blocks: Array, dtype: DType) -> Array:
    """Return the values of blocks, float32, one row for each block."""
    q = blocks["q"]
    numbers = q.astype(np.float32) if dtype is DType.BLOCK8 else _E4M3[q.view(np.uint8)]
    values: Array = blocks["scale"][:, np.newaxis] * numbers
    return values


def rounded(values: Array, dtype: DType, *, dithered: bool = False) -> Array:
    """Round float32 values to blocks, one for each row of 252: to nearest, or dithered."""
    largest = np.abs(values).max(axis=1)
    is_finite = np.isfinite(largest)
    is_usual = is_finite & (largest >= _SMALLEST)
    m = np.where(is_usual, largest, np.float32(1))
    y = values * (_LARGEST_Q[dtype] / m)[:, np.newaxis]
    dither = _dither(values) if dithered else np.float32(0)
    q = np.rint(y + dither) if dtype is DType.BLOCK8 else _to_e4m3(y, dither)
    blocks = np.empty(len(values), ELEMENT)
    blocks["scale"] = np.where(is_usual, m / _LARGEST_Q[dtype], np.where(is_finite, 0, np.nan))
    blocks["q"] = np.where(is_usual[:, np.newaxis], q, 0)
    return blocks


def _to_e4m3(y: Array, dither: Any) -> Array:
    """Round to E4M3's bytes, as int8."""
    size = np.abs(y)
    # The power of two that has 8 steps; 16 steps are 8 of the next exponent.
    exponents = np.maximum(size.view(np.int32) >> 23, np.int32(_E4M3_SMALL))
    steps = np.rint(np.ldexp(size, 130 - exponents) + dither).astype(np.int32)
    codes = steps + (exponents - np.int32(_E4M3_SMALL) << 3)
    q: Array = (codes | np.where(np.signbit(y), 0x80, 0)).astype(np.uint8).view(np.int8)
    return q


def _dither(values: Array) -> Array:
    """Return what is added to each value in steps, between -1/2 and 1/2 (`block8.h` says more)."""
    mixed = (values.view(np.uint32) ^ _PLACES) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE35)
    steps: Array = (mixed >> np.uint32(20)).astype(np.float32) - np.float32(2047.5)
    return steps * np.float32(2.0**-12)
