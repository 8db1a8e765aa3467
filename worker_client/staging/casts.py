"""Casts between float32 and the 16-bit types that travel, compiled or in NumPy.

Every variant gives the same bits, which `cast.h` describes, so ranks with different CPUs agree.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from reducer.wire.constants import DType

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bytes: TypeAlias = memoryview

_BLOCK = 1 << 15  # elements at a time: all intermediate steps stay in the L2 cache
FLOATS: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT64: np.dtype("<f8"),
}


class Casts(Protocol):
    """One variant. It has no state; threads may share it.

    Buffers are contiguous views of bytes, at any alignment, that do not overlap; their lengths fit
    together. The compiled variants hold no GIL.
    """

    @property
    def name(self) -> str:
        """One of ``avx512``, ``avx2``, ``generic`` and ``numpy``."""

    def narrow(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        """Round float32 `values` to FLOAT16 or BFLOAT16 in `out`: to nearest, ties to even."""

    def narrow_keeping(self, values: Bytes, residual: Bytes, out: Bytes, dtype: DType) -> None:
        """Round `values + residual`, and keep in `residual` what rounding takes away, if finite."""

    def widen(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        """Cast FLOAT16 or BFLOAT16 `values` to float32 in `out`, exactly."""

    def divide(self, values: Bytes, by: float, dtype: DType) -> None:
        """Divide FLOAT32 or FLOAT64 `values` in place by `by`, rounded to their type."""


class PlainCasts:
    """The variant ``numpy``; see `Casts`."""

    name = "numpy"

    def narrow(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        floats, halves = np.frombuffer(values, "<f4"), np.frombuffer(out, "<u2")
        for block in _blocks(halves.size):
            halves[block] = _round(floats[block], dtype)

    def narrow_keeping(self, values: Bytes, residual: Bytes, out: Bytes, dtype: DType) -> None:
        floats, halves = np.frombuffer(values, "<f4"), np.frombuffer(out, "<u2")
        rest = np.frombuffer(residual, "<f4")
        with np.errstate(all="ignore"):
            for block in _blocks(halves.size):
                total = floats[block] + rest[block]
                halves[block] = _round(total, dtype)
                total -= _float(halves[block], dtype)
                rest[block] = np.where(np.isfinite(total), total, np.float32(0))

    def widen(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        halves, floats = np.frombuffer(values, "<u2"), np.frombuffer(out, "<f4")
        for block in _blocks(halves.size):
            floats[block] = _one_nan(_float(halves[block], dtype))

    def divide(self, values: Bytes, by: float, dtype: DType) -> None:
        numbers = np.frombuffer(values, FLOATS[dtype])
        with np.errstate(all="ignore"):
            for block in _blocks(numbers.size):
                numbers[block] = _one_nan(numbers[block] / numbers.dtype.type(by))


def select(name: str | None = None) -> Casts:
    """Return the variant called `name`, or the best one that this machine can run.

    Raises:
        KeyError: it has no such variant.
    """
    usable = variants()
    return usable[name] if name is not None else next(iter(usable.values()))


def variants() -> dict[str, Casts]:
    """Return the variants of this machine by name, best first."""
    usable: list[Casts] = []
    try:
        from worker_client.staging import _cast  # noqa: PLC0415
    except ImportError:  # built without a C compiler
        pass
    else:
        usable += _cast.usable()
    usable.append(PlainCasts())
    return {casts.name: casts for casts in usable}


def _blocks(size: int) -> list[slice]:
    return [slice(start, start + _BLOCK) for start in range(0, size, _BLOCK)]


def _one_nan(numbers: Array) -> Array:
    """Make any NaN of a temporary the positive quiet one without payload."""
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def _round(floats: Array, dtype: DType) -> Array:
    halves: Array
    floats = _one_nan(floats.copy())
    if dtype is DType.FLOAT16:
        with np.errstate(all="ignore"):
            halves = floats.astype("<f2").view("<u2")
        return halves
    bits = floats.view("<u4")
    last = (bits >> np.uint32(16)) & np.uint32(1)
    halves = ((bits + (np.uint32(0x7FFF) + last)) >> np.uint32(16)).astype("<u2")
    return halves


def _float(halves: Array, dtype: DType) -> Array:
    if dtype is DType.FLOAT16:
        floats: Array = halves.view("<f2").astype("<f4")
    else:
        floats = (halves.astype("<u4") << np.uint32(16)).view("<f4")
    return floats
