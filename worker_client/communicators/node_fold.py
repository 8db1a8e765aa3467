"""The sum of what the ranks of one node have, by the reducers' kernels: their order, their bits.

16-bit types are folded, and travel on, in fp32: they are rounded once, at the very end, as where
every rank sends its own to the reducers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from reducer import kernels
from reducer.wire.constants import DType
from worker_client.staging import casts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.wire.constants import ReduceOp

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_KERNELS, _CASTS = kernels.select(), casts.select()


def folded_as(dtype: DType) -> DType:
    """Return the type in which elements are folded."""
    return DType.FLOAT32 if dtype.itemsize == 2 else dtype


def fold(rows: Sequence[memoryview], dtype: DType, op: ReduceOp) -> Array:
    """Reduce rows of equally many elements, the first with the second and so on, as `folded_as`."""
    wide = folded_as(dtype)
    folded = np.empty(rows[0].nbytes // dtype.itemsize * wide.itemsize, np.uint8)
    if wide is dtype:
        _KERNELS.reduce(rows, folded, wide, op)
        return folded
    _CASTS.widen(rows[0], folded.data, dtype)
    floats = np.empty_like(folded)  # of one row at a time
    for row in rows[1:]:
        _CASTS.widen(row, floats.data, dtype)
        _KERNELS.reduce([folded, floats], folded, wide, op)
    return folded


def finish(folded: Array, dtype: DType, divisor: int, target: memoryview) -> None:
    """Divide by the number of ranks for a mean, or by 1, round once, and write to `target`.

    `folded` is what `fold` has returned, and is overwritten; `dtype` is that of `target`.
    """
    wide = folded_as(dtype)
    if divisor != 1:
        _CASTS.divide(folded.data, divisor, wide)
    if wide is dtype:
        target[:] = folded.data
    else:
        _CASTS.narrow(folded.data, target, dtype)
