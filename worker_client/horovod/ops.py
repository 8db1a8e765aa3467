"""What scripts name in calls: reductions, compression of gradients, and handles."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reducer.errors import ConfigError, ReductionError
from reducer.wire.constants import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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


class Waitable(Protocol):
    """What a handle may be made of: an all-reduce's `Work`, or another handle."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self) -> Any:
        """Wait until it has ended."""


class Handle:
    """One asynchronous call, which may be made of several all-reduces.

    Args:
        works: the all-reduces; none for what is done already.
        finish: makes the call's result of theirs, once; in the thread that waits first.
    """

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Wait until all is done, and return the call's result: a tensor or a list of tensors.

        Raises:
            ReductionError: an all-reduce failed; the class and its attributes say why.
        """
        if self._finish is not None:
            wait_for_all(self._works)
            self._result = self._finish()
            self._works, self._finish = (), None
        return self._result


def wait_for_all(works: Iterable[Waitable]) -> None:
    """Wait for every one, and only then raise the first one's error, if there is one.

    Raises:
        ReductionError: an all-reduce failed.
    """
    first: ReductionError | None = None
    for work in works:
        try:
            work.wait()
        except ReductionError as error:
            first = first or error
    if first is not None:
        raise first


def poll(handle: Handle) -> bool:
    """Whether an asynchronous call is done, so that `synchronize` would not wait."""
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call and return its result; in-place ones are complete only then.

    Raises:
        ReductionError: it failed; the class and its attributes say why.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"a handle of an asynchronous call is needed, got {handle!r}")
    return handle
