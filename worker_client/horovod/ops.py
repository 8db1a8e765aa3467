"""What ranks may reduce by, in Horovod's names and numbers."""

from __future__ import annotations

from enum import IntEnum

import torch

from reducer.errors import ConfigError
from reducer.wire.constants import ReduceOp


class Op(IntEnum):
    """A reduction; scripts use the names below. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average, Sum, Adasum, Min, Max, Product = Op

_BY_AVERAGE = {True: Op.AVERAGE, False: Op.SUM}
_NAMES = {Op.SUM: "sum", Op.MIN: "min", Op.MAX: "max", Op.PRODUCT: "product"}


def choose(op: int | None, average: bool | None = None) -> Op:
    """Return the reduction that a call asks for; `Average` if it does not say.

    Args:
        op: one of the constants of this module.
        average: the older way to say `Average` or `Sum`.

    Raises:
        ConfigError: both are given, `op` is unknown, or it is `Adasum`.
    """
    if average is not None:
        if op is not None:
            raise ConfigError(
                f"both op={op!r} and average={average!r} are given: leave out average="
            )
        return _BY_AVERAGE[bool(average)]
    if op is None:
        return Op.AVERAGE
    try:
        chosen = Op(op)
    except ValueError:
        raise ConfigError(
            f"unknown op {op!r}: use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product"
        ) from None
    if chosen is Op.ADASUM:
        raise ConfigError(
            "reducers do not do Adasum, which needs more than a sum: use op=hvd.Average, and a "
            "learning rate for that"
        )
    return chosen


def divides(op: Op, dtype: torch.dtype) -> bool:
    """Whether ranks divide a sum themselves: reducers take means of floating types alone."""
    return op is Op.AVERAGE and not dtype.is_floating_point


def on_the_wire(op: Op, dtype: torch.dtype) -> str:
    """Return what `Client.all_reduce` calls it."""
    if op is Op.AVERAGE:
        return "sum" if divides(op, dtype) else "mean"
    return _NAMES[op]


def neutral(op: ReduceOp, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a contribution of so many bytes that changes no other rank's."""
    count = nbytes // dtype.itemsize
    if op is ReduceOp.PRODUCT:
        return torch.ones(count, dtype=dtype)
    if op in {ReduceOp.MIN, ReduceOp.MAX}:
        if dtype.is_floating_point:
            edge = float("inf") if op is ReduceOp.MIN else float("-inf")
        else:
            limits = torch.iinfo(dtype)
            edge = limits.max if op is ReduceOp.MIN else limits.min
        return torch.full((count,), edge, dtype=dtype)
    return torch.zeros(count, dtype=dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return dtype


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are rounded towards zero."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))
