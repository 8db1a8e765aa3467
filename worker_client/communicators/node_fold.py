"""What the ranks of a node make of their parts: folds in our order on every device, and rounds.

NCCL's own reduce-scatter adds in an order that depends on sizes and channels; this one does not.
"""

from __future__ import annotations

import torch

from reducer.wire.constants import DType, ReduceOp

TYPES: dict[DType, torch.dtype] = {
    dtype: getattr(torch, dtype.name.lower()) for dtype in DType if not dtype.is_block
}


def folded_as(dtype: DType) -> DType:
    """Return the type in which elements are folded, and travel between nodes."""
    return DType.FLOAT32 if dtype.itemsize == 2 else dtype


def fold(rows: torch.Tensor, dtype: DType, op: ReduceOp) -> torch.Tensor:
    """Fold rows of elements from the first to the last, 16-bit ones in fp32; leaves `rows` alone.

    A mean is divided by the number of rows.
    """
    total = rows[0].to(TYPES[folded_as(dtype)], copy=True)
    for row in rows[1:]:
        if op is ReduceOp.PRODUCT:
            total.mul_(row)
        elif op in {ReduceOp.SUM, ReduceOp.MEAN}:
            total.add_(row)
        else:
            replaces = row < total if op is ReduceOp.MIN else row > total
            total = torch.where(replaces | row.isnan(), row, total)
    if op is ReduceOp.MEAN:
        # By a tensor of the device: by a number, torch multiplies with its inverse there.
        total.div_(torch.full((), len(rows), dtype=total.dtype, device=total.device))
    return total


def rounded(folded: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return what was folded in its own type, rounded to nearest, ties to even, with one NaN."""
    if folded.dtype is TYPES[dtype]:
        return folded
    return folded.to(TYPES[dtype]).masked_fill_(folded.isnan(), torch.nan)
