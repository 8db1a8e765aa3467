"""Casts between float32 and the narrower types that travel, by the best code for this machine.

Every variant gives the same bits, which `cast.h` describes, so ranks with different CPUs agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reducer.kernels import block8
from reducer.wire.constants import BLOCK_VALUES, DType
from worker_client.staging import _cast

_STEP = 128  # blocks at a time: all intermediate steps stay in the L2 cache
FLOATS: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT64: np.dtype("<f8"),
}


def dither(values: memoryview, out: memoryview, dtype: DType) -> None:
    """Round float32 `values`, whole blocks, to blocks in `out` as reducers round results."""
    rows = np.frombuffer(values, "<f4").reshape(-1, BLOCK_VALUES)
    blocks = np.frombuffer(out, block8.ELEMENT)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            blocks[part] = block8.rounded(rows[part], dtype, dithered=True)


def select(name: str | None = None) -> _cast.CompiledCasts:
    """Return the variant called `name`, or the best one that this machine can run."""
    found = variants()
    return found[name] if name is not None else next(iter(found.values()))


def variants() -> dict[str, _cast.CompiledCasts]:
    """Return the variants of this machine by name, best first."""
    return {casts.name: casts for casts in _cast.usable()}
