"""All-reduce, as Horovod has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import Op, choose
from worker_client.horovod.reduction import Asked, dense_copy, start
from worker_client.horovod.torch.compression import Compression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.horovod.groups import Group
    from worker_client.horovod.ops import Handle
    from worker_client.horovod.torch.compression import Compressor


class _AllReduce(torch.autograd.Function):
    """All-reduce of several tensors whose gradient is the all-reduce of their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        how: tuple[int | None, bool | None],
        scales: tuple[float, float],
        group: Group,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        def ask() -> Asked:
            ctx.op, ctx.scales, ctx.group = choose(*how), scales, group
            copies = [dense_copy(tensor) for tensor in tensors]
            return Asked(copies, copies, ctx.op)

        reduced: list[torch.Tensor] = start(group, tensors, name, scales, ask).wait()
        return tuple(reduced)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.op not in {Op.AVERAGE, Op.SUM}:
            raise ConfigError(
                f"the gradient of {ctx.op.name.title()} is not defined: reduce a tensor.detach()"
            )

        def ask() -> Asked:
            copies = [dense_copy(grad) for grad in grads]
            return Asked(copies, copies, ctx.op)

        return None, None, None, None, *start(ctx.group, grads, None, ctx.scales, ask).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """Start to replace a tensor by its reduction over all ranks; for `synchronize` or `poll`.

    Args:
        tensor: on the CPU or a CUDA device, of any shape, the same at every rank.
        average: the older way to say `Average` or `Sum`.
        name: the same at every rank; by default numbered.
        op: `Average` (the default; of integers rounded towards zero), `Sum`, `Min`, `Max` or
            `Product`.
        prescale_factor: what the contributions are multiplied by.
        postscale_factor: what the result is multiplied by.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the tensor or an argument is not supported.
    """
    scales = (prescale_factor, postscale_factor)
    group = group_of(process_set)
    return start(
        group, [tensor], name, scales, lambda: Asked([tensor], tensor, choose(op, average))
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """Start a reduction over all ranks into a new tensor; arguments as `allreduce_async_`."""

    def ask() -> Asked:
        copy = dense_copy(tensor)
        return Asked([copy], copy, choose(op, average))

    scales = (prescale_factor, postscale_factor)
    return start(group_of(process_set), [tensor], name, scales, ask)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> torch.Tensor:
    """Replace a tensor by its reduction over all ranks; arguments as `allreduce_async_`."""
    reduced: torch.Tensor = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return reduced


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks, through which gradients pass.

    Args:
        tensor: on the CPU or a CUDA device, of any shape, the same at every rank.
        average: the older way to say `Average` or `Sum`.
        name: the same at every rank; by default numbered.
        compression: how it travels, one of `Compression`.
        op: as `allreduce_async_`; gradients pass through `Average` and `Sum` alone.
        prescale_factor: what the contributions are multiplied by.
        postscale_factor: what the result is multiplied by.
        process_set: the ranks that take part.

    Raises:
        ReductionError: the all-reduce failed; the class and its attributes say why.
    """
    narrow, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    group = group_of(process_set)
    (reduced,) = _AllReduce.apply(name, (op, average), scales, group, narrow)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """As `allreduce_async_`, of a list of tensors, which travel together."""
    scales = (prescale_factor, postscale_factor)
    group = group_of(process_set)
    return start(
        group, tensors, name, scales, lambda: Asked(tensors, list(tensors), choose(op, average))
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """As `allreduce_async`, of a list of tensors, which travel together."""

    def ask() -> Asked:
        copies = [dense_copy(tensor) for tensor in tensors]
        return Asked(copies, copies, choose(op, average))

    scales = (prescale_factor, postscale_factor)
    return start(group_of(process_set), tensors, name, scales, ask)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> list[torch.Tensor]:
    """As `allreduce_`, of a list of tensors, which travel together."""
    reduced: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
) -> list[torch.Tensor]:
    """As `allreduce`, of a list of tensors, which travel together."""
    narrow = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    given = [tensor for tensor, _ in narrow]
    group = group_of(process_set)
    reduced = _AllReduce.apply(name, (op, average), scales, group, *given)  # type: ignore[no-untyped-call]
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, narrow, strict=True)]
