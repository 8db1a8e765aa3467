"""What scripts name in calls: reductions, and handles of calls in progress."""

from __future__ import annotations

import math
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
LINEAR = (Op.AVERAGE, Op.SUM)  # gradients pass through these


def choose(op: int | None, average: bool | None = None) -> Op:
    """Return the reduction that a call asks for, by `average` in older scripts."""
    if average is not None:
        if op is not None:
            raise ConfigError(
                f"both op={op!r} and average={average!r} are given: leave out average="
            )
        return Op.AVERAGE if average else Op.SUM
    try:
        chosen = Op.AVERAGE if op is None else Op(op)
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


def predivided(op: int | None, factor: float) -> tuple[Op, tuple[float, float]]:
    """Return the reduction of gradients, and their factors before and after it."""
    chosen = choose(op)
    if factor != 1.0 and chosen is not Op.AVERAGE:
        raise ConfigError("gradient_predivide_factor goes with op=hvd.Average alone")
    return chosen, (1.0 / factor, factor)


def check_passes(passes: int) -> int:
    """Return the number of backward passes of a step; less than one is refused."""
    if passes < 1:
        raise ConfigError(f"backward_passes_per_step must be 1 or more, got {passes}")
    return passes


def divides(op: Op, dtype: torch.dtype) -> bool:
    """Whether ranks divide a sum themselves: reducers take means of floating types alone."""
    return op is Op.AVERAGE and not dtype.is_floating_point


def on_the_wire(op: Op, dtype: torch.dtype) -> str:
    """Return what `Client.all_reduce` calls it."""
    if op is Op.AVERAGE:
        return "sum" if divides(op, dtype) else "mean"
    return op.name.lower()


def neutral(op: ReduceOp, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a contribution of so many bytes that changes no other rank's."""
    value: float = int(op is ReduceOp.PRODUCT)
    if op in {ReduceOp.MIN, ReduceOp.MAX} and dtype.is_floating_point:
        value = math.inf if op is ReduceOp.MIN else -math.inf
    elif op in {ReduceOp.MIN, ReduceOp.MAX}:
        limits = torch.iinfo(dtype)
        value = limits.max if op is ReduceOp.MIN else limits.min
    return torch.full((nbytes // dtype.itemsize,), value, dtype=dtype)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are rounded towards zero."""
    if factor != 1.0 and tensor.dtype.is_floating_point:
        tensor.mul_(factor)
    elif factor != 1.0:
        tensor.copy_(tensor.double().mul_(factor))


class Waitable(Protocol):
    """What a handle may be made of: an all-reduce's `Work`, a gather or another handle."""

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
    """Wait for every one, and only then raise the first one's error, if there is one."""
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
