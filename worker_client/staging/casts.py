"""Casts between float32 and the narrower types that travel, compiled or in NumPy.

Every variant gives the same bits, which `cast.h` describes, so ranks with different CPUs agree.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from reducer.kernels import block8
from reducer.wire.constants import BLOCK_VALUES, DType

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Bytes: TypeAlias = memoryview

_STEP = 128 * BLOCK_VALUES  # values at a time: all intermediate steps stay in the L2 cache
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
        """One of ``avx512``, ``avx2``, ``neon``, ``generic`` and ``numpy``."""

    def narrow(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        """Round float32 `values` to FLOAT16, BFLOAT16 or blocks in `out`: to nearest even."""

    def narrow_keeping(self, values: Bytes, residual: Bytes, out: Bytes, dtype: DType) -> None:
        """Round `values + residual`, and keep in `residual` what rounding takes away, if finite."""

    def widen(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        """Cast FLOAT16, BFLOAT16 or blocks, `values`, to float32 in `out`.

        Exactly, but for the multiplication by a block's scale.
        """

    def divide(self, values: Bytes, by: float, dtype: DType) -> None:
        """Divide FLOAT32 or FLOAT64 `values` in place by `by`, rounded to their type."""


class PlainCasts:
    """The variant ``numpy``; see `Casts`."""

    name = "numpy"

    def narrow(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        floats, sent = np.frombuffer(values, "<f4"), np.frombuffer(out, np.uint8)
        with np.errstate(all="ignore"):
            for part in _parts(floats.size):
                sent[_travels(part, dtype)] = _round(floats[part], dtype)

    def narrow_keeping(self, values: Bytes, residual: Bytes, out: Bytes, dtype: DType) -> None:
        floats, sent = np.frombuffer(values, "<f4"), np.frombuffer(out, np.uint8)
        rest = np.frombuffer(residual, "<f4")
        with np.errstate(all="ignore"):
            for part in _parts(floats.size):
                total = floats[part] + rest[part]
                rounded = sent[_travels(part, dtype)] = _round(total, dtype)
                total -= _float(rounded, dtype)[: total.size]
                rest[part] = np.where(np.isfinite(total), total, np.float32(0))

    def widen(self, values: Bytes, out: Bytes, dtype: DType) -> None:
        sent, floats = np.frombuffer(values, np.uint8), np.frombuffer(out, "<f4")
        with np.errstate(all="ignore"):
            for part in _parts(floats.size):
                numbers = _one_nan(_float(sent[_travels(part, dtype)], dtype))
                floats[part] = numbers[: part.stop - part.start]

    def divide(self, values: Bytes, by: float, dtype: DType) -> None:
        numbers = np.frombuffer(values, FLOATS[dtype])
        with np.errstate(all="ignore"):
            for part in _parts(numbers.size):
                numbers[part] = _one_nan(numbers[part] / numbers.dtype.type(by))


def dither(values: Bytes, out: Bytes, dtype: DType) -> None:
    """Round float32 `values`, whole blocks, to blocks in `out` as reducers round results."""
    rows = np.frombuffer(values, "<f4").reshape(-1, BLOCK_VALUES)
    blocks = np.frombuffer(out, block8.ELEMENT)
    step = _STEP // BLOCK_VALUES
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            blocks[part] = block8.rounded(rows[part], dtype, dithered=True)


def select(name: str | None = None) -> Casts:
    """Return the variant called `name`, or the best one that this machine can run."""
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


def _parts(size: int) -> list[slice]:
    return [slice(start, min(start + _STEP, size)) for start in range(0, size, _STEP)]


def _travels(part: slice, dtype: DType) -> slice:
    """Return where a part of the values is among the bytes that travel."""
    return slice(dtype.nbytes(part.start), dtype.nbytes(part.stop))


def _one_nan(numbers: Array) -> Array:
    """Make any NaN of a temporary the positive quiet one without payload."""
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def _round(floats: Array, dtype: DType) -> Array:
    if dtype.is_block:
        filled = np.zeros(dtype.nbytes(floats.size) // dtype.itemsize * BLOCK_VALUES, np.float32)
        filled[: floats.size] = floats
        return block8.rounded(filled.reshape(-1, BLOCK_VALUES), dtype).view(np.uint8)
    floats = _one_nan(floats.copy())
    if dtype is DType.FLOAT16:
        return floats.astype("<f2").view(np.uint8)
    bits = floats.view("<u4")
    last = (bits >> np.uint32(16)) & np.uint32(1)
    halves: Array = ((bits + (np.uint32(0x7FFF) + last)) >> np.uint32(16)).astype("<u2")
    return halves.view(np.uint8)


def _float(sent: Array, dtype: DType) -> Array:
    """Return what bytes that travel stand for; of blocks with what fills the last one up."""
    if dtype.is_block:
        return block8.values_of(sent.view(block8.ELEMENT), dtype).reshape(-1)
    floats: Array
    if dtype is DType.FLOAT16:
        floats = sent.view("<f2").astype("<f4")
    else:
        floats = (sent.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return floats
