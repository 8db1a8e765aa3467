"""The sum of what the ranks of one node have, in the order and precision of the guarantee.

A left fold in local-rank order. 16-bit types are folded, and travel on, in fp32: they are rounded
once, at the very end, as where every rank sends its own to the reducers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from reducer.wire.constants import DType, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_TYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # which NumPy does not know: its bits
    DType.INT8: np.dtype(np.int8),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT8: np.dtype(np.uint8),
}


def _keep(precedes: Callable[[Array, Array], Any]) -> Callable[[Array, Array], None]:
    """Return the step of MIN or MAX: NaN wins, and a tie (-0 and +0) leaves the earlier value."""

    def step(folded: Array, row: Array) -> None:
        np.copyto(folded, row, where=precedes(row, folded) | np.isnan(row))

    return step


_STEPS: dict[ReduceOp, Callable[[Array, Array], Any]] = {
    ReduceOp.SUM: lambda folded, row: np.add(folded, row, out=folded),
    ReduceOp.MEAN: lambda folded, row: np.add(folded, row, out=folded),
    ReduceOp.MIN: _keep(np.less),  # np.minimum's tie is the later one's at times
    ReduceOp.MAX: _keep(np.greater),
    ReduceOp.PRODUCT: lambda folded, row: np.multiply(folded, row, out=folded),
}


def itemsize(dtype: DType) -> int:
    """Return the bytes of an element."""
    return _TYPES[dtype].itemsize


def folded_as(dtype: DType) -> DType:
    """Return the type in which elements are folded."""
    return DType.FLOAT32 if itemsize(dtype) == 2 else dtype


def fold(rows: Sequence[memoryview], dtype: DType, op: ReduceOp) -> Array:
    """Reduce rows of equally many elements, the first with the second and so on.

    Returns:
        A new array, in fp32 for 16-bit types, which `finish` makes an end of; for MEAN it is the
        sum.
    """
    # Integers wrap around, and floats overflow to infinity, as in reducers.
    with np.errstate(all="ignore"):
        folded = _widen(rows[0], dtype)
        for row in rows[1:]:
            _STEPS[op](folded, _widen(row, dtype))
    return folded


def finish(folded: Array, dtype: DType, divisor: int, target: memoryview) -> None:
    """Divide, round once, and write to `target`.

    Args:
        folded: as from `fold`; it is overwritten.
        dtype: of the elements of `target`.
        divisor: number of ranks for a mean, 1 for anything else.
        target: bytes of as many elements as `folded` has.
    """
    with np.errstate(all="ignore"):
        if divisor != 1:
            np.divide(folded, folded.dtype.type(divisor), out=folded)
        result = np.frombuffer(target, _TYPES[dtype])
        if dtype is DType.BFLOAT16:
            result[:] = _bfloat16(folded)
        else:
            result[:] = folded


def _widen(row: memoryview, dtype: DType) -> Array:
    """Return a row's elements in a new array of the type in which they are folded."""
    elements = np.frombuffer(row, _TYPES[dtype])
    if dtype is DType.BFLOAT16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32 if dtype is DType.FLOAT16 else elements.dtype)


def _bfloat16(values: Array) -> Array:
    """Return the bits of fp32 values rounded to bfloat16, to nearest and ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    # A NaN keeps its upper bits, and one that says that it is none of those that become infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
