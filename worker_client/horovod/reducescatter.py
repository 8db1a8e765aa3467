"""Reduce-scatter, as Horovod has it, made of an all-reduce of which each rank keeps its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.gather import grouped_allgather
from worker_client.horovod.ops import Handle, Op, choose
from worker_client.horovod.reduction import Asked, dense_copy, start
from worker_client.horovod.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.horovod.groups import Group
    from worker_client.horovod.torch.compression import Compressor


def _own_rows(group: Group, reduced: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the first dimension; the first ranks have what is left over."""
    rank, size = group.rank, group.size
    each, over = divmod(reduced.shape[0], size)
    return reduced.narrow(0, each * rank + min(rank, over), each + (rank < over)).clone()


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Handle:
    """Start reduce-scatters that travel together; the handle has a list of this rank's rows."""
    group = group_of(process_set)

    def ask() -> Asked:
        chosen = choose(op)
        if chosen not in {Op.AVERAGE, Op.SUM}:
            raise ConfigError("reducescatter takes op=hvd.Average or op=hvd.Sum")
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ConfigError("reducescatter takes tensors of one dimension or more, not scalars")
        copies = [dense_copy(tensor) for tensor in tensors]
        return Asked(copies, copies, chosen)

    reduction = start(group, tensors, name, scales, ask)
    return Handle([reduction], lambda: [_own_rows(group, one) for one in reduction.wait()])


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatters whose gradients are all ranks' rows, gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = _start(tensors, name, op, scales, process_set).wait()
        ctx.process_set = process_set
        ctx.factor = scales[0] * scales[1]
        if choose(op) is Op.SUM:
            ctx.factor *= group_of(process_set).size
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scaled = [grad * ctx.factor for grad in grads]
        return None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction; arguments as `allreduce`.

    Rows are those of the first dimension, divided equally; the first ranks have one more each if
    there is a remainder. Gradients pass through it.

    Raises:
        ConfigError: `op` is neither `Average` nor `Sum`, or the tensor is a scalar.
    """
    scales = prescale_factor, postscale_factor
    (rows,) = grouped_reducescatter([tensor], name, compression, op, process_set, *scales)
    return rows


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start what `reducescatter` does, without gradients; for `synchronize` or `poll`."""
    handle = _start([tensor], name, op, (prescale_factor, postscale_factor), process_set)
    return Handle([handle], lambda: handle.wait()[0])


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `reducescatter`, of a list of tensors, which travel together."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    given = [tensor for tensor, _ in narrow]
    scales = prescale_factor, postscale_factor
    rows = _ReduceScatter.apply(name, op, scales, process_set, *given)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(rows, narrow, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async`, of a list of tensors, which travel together."""
    return _start(tensors, name, op, (prescale_factor, postscale_factor), process_set)
