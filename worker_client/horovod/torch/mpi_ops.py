"""The calls between ranks that take PyTorch's tensors, and what all frameworks have.

A call has forms: those with ``async`` in their name return a handle for `synchronize` or `poll`,
those that end with ``_`` replace the tensor, those with ``grouped`` take a list of tensors, which
travel together, and gradients pass through those that neither return a handle nor replace.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.horovod import groups
from worker_client.horovod.common import basics
from worker_client.horovod.common.basics import *  # noqa: F403
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import LINEAR, Handle, Op, choose, poll, synchronize
from worker_client.horovod.torch.compression import Compression, compressed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from worker_client.horovod.torch.compression import Compressor

    Tensors = Sequence[torch.Tensor]
    Step = Callable[[Tensors], Tensors]
    R = TypeVar("R")

__all__ = ["Handle", "poll", "synchronize"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_allreduce_async", "grouped_allreduce_async_", "sparse_allreduce_async"]
__all__ += ["barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "reducescatter", "reducescatter_async"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += basics.__all__


def _form_of(call: Callable[..., Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a form of a call the call's arguments, but for the first one, which is its own."""

    def with_arguments(form: Callable[..., R]) -> Callable[..., R]:
        of_call, of_form = inspect.signature(call), inspect.signature(form)
        rest = [one for one in of_call.parameters.values() if one.kind is not one.KEYWORD_ONLY]
        given = [*list(of_form.parameters.values())[:1], *rest[1:]]
        vars(form)["__signature__"] = of_form.replace(parameters=given)
        return form

    return with_arguments


class _Differentiable(torch.autograd.Function):
    """A call that has ended when it returns, and whose results have a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Step, gradient: Step, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.gradient = gradient
        return tuple(call(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gradient(grads)


def _differentiable(tensors: Tensors, call: Step, gradient: Step) -> list[torch.Tensor]:
    return list(_Differentiable.apply(call, gradient, *tensors))  # type: ignore[no-untyped-call]


def _only(handle: Handle) -> Handle:
    return Handle([handle], lambda: handle.wait()[0])


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
    """Return the reduction of a tensor over all ranks.

    Args:
        tensor: on the CPU or a CUDA device, of any shape, the same at every rank.
        average: the older way to say `Average` or `Sum`.
        name: the same at every rank; by default numbered.
        compression: how it travels, one of `Compression`.
        op: `Average` (the default; of integers rounded towards zero), `Sum`, `Min`, `Max` or
            `Product`. Gradients pass through the first two.
        prescale_factor: what the contributions are multiplied by.
        postscale_factor: what the result is multiplied by.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the tensor or an argument is not supported.
        ReductionError: the all-reduce failed; the class and its attributes say why.
    """
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


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
    """As `allreduce`, of a list of tensors."""
    given = op, prescale_factor, postscale_factor, process_set

    def call(tensors: Tensors) -> Tensors:
        return grouped_allreduce_async(tensors, average, name, *given).wait()  # type: ignore[no-any-return]

    def gradient(grads: Tensors) -> Tensors:
        if (chosen := choose(op, average)) not in LINEAR:
            raise ConfigError(
                f"the gradient of {chosen.name.title()} is not defined: reduce a tensor.detach()"
            )
        return grouped_allreduce(grads, average, None, Compression.none, *given)

    return compressed(compression, tensors, lambda narrow: _differentiable(narrow, call, gradient))


def _start_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
    *,
    prepare: Callable[[Tensors], list[torch.Tensor]] = groups.copies,
) -> Handle:
    group, scales = group_of(process_set), (prescale_factor, postscale_factor)
    return groups.start_allreduce(group, tensors, name, (op, average), scales, prepare)


@_form_of(_start_allreduce)
def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start what `allreduce` does, without gradients; for `synchronize` or `poll`."""
    return _only(_start_allreduce([tensor], *args, **kwargs))


@_form_of(_start_allreduce)
def allreduce_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to replace a tensor by its reduction over all ranks; arguments as `allreduce`."""
    return _only(grouped_allreduce_async_([tensor], *args, **kwargs))


@_form_of(_start_allreduce)
def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace a tensor by its reduction over all ranks; arguments as `allreduce`."""
    return allreduce_async_(tensor, *args, **kwargs).wait()  # type: ignore[no-any-return]


@_form_of(_start_allreduce)
def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async`, of a list of tensors."""
    return _start_allreduce(tensors, *args, **kwargs)


@_form_of(_start_allreduce)
def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    """As `allreduce_async_`, of a list of tensors."""
    return _start_allreduce(tensors, *args, prepare=list, **kwargs)


@_form_of(_start_allreduce)
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """As `allreduce_`, of a list of tensors."""
    return grouped_allreduce_async_(tensors, *args, **kwargs).wait()  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = ALL_RANKS
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse tensor; return a function that waits and returns it.

    It is of the same shape at every rank; indices may differ. `op` is `Average` or `Sum`.

    Raises:
        ConfigError: the tensor is dense, or `op` is another one.
    """
    return groups.start_sparse(group_of(process_set), tensor, name, choose(op)).wait


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> torch.Tensor:
    """Return what a tensor is at rank `root_rank`, bit for bit.

    Args:
        tensor: on the CPU or a CUDA device, of any dtype, and of the same shape at every rank.
            Gradients pass through it, to the root.
        root_rank: the rank whose values it is to be, as ``hvd.rank()`` numbers it.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        ConfigError: there is no such rank, or the tensor is not supported.
        MismatchError: ranks disagree on the root, the dtype or the shape, as every rank hears; a
            tensor that was to be replaced is as it was then.
    """

    def gradient(grads: Tensors) -> Tensors:
        group = group_of(process_set)
        (grad,) = grouped_allreduce(grads, process_set=process_set)
        is_root = group.number(root_rank) == group.client.rank
        return [grad if is_root else torch.zeros_like(grad)]

    def call(given: Tensors) -> Tensors:
        return [broadcast_async(given[0], root_rank, name, process_set).wait()]

    return _differentiable([tensor], call, gradient)[0]


def _start_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
    *,
    prepare: Callable[[Tensors], list[torch.Tensor]] = groups.copies,
) -> Handle:
    group = group_of(process_set)
    with group.call("broadcast", name) as wire:
        (target,) = prepare([tensor])
        root = group.number(root_rank)
        groups.check_device(target)
    return groups.start_broadcast(group.client, target, root, wire)


@_form_of(_start_broadcast)
def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start what `broadcast` does, without gradients; for `synchronize` or `poll`."""
    return _start_broadcast(tensor, *args, **kwargs)


@_form_of(_start_broadcast)
def broadcast_async_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start to replace a tensor by what it is at rank `root_rank`; arguments as `broadcast`."""
    return _start_broadcast(tensor, *args, prepare=list, **kwargs)


@_form_of(_start_broadcast)
def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace a tensor by what it is at rank `root_rank`; arguments as `broadcast`."""
    return broadcast_async_(tensor, *args, **kwargs).wait()  # type: ignore[no-any-return]


def barrier(process_set: ProcessSet = ALL_RANKS) -> None:
    """Wait until every rank has called it."""
    group = group_of(process_set)
    with group.call("barrier", None) as wire:
        data = torch.zeros(1, dtype=torch.uint8)
    group.client.all_reduce(data, "max", name=wire).wait()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> torch.Tensor:
    """Return all ranks' tensors, one after the other along the first dimension.

    Args:
        tensor: on the CPU or a CUDA device, of any dtype; only the first dimension may differ
            between ranks. Its gradient is the average of all ranks', of this rank's rows.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        MismatchError: shapes or dtypes do not fit together.
    """
    return _allgather([tensor], [name], process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> list[Any]:
    """As `allgather`, of a list of tensors."""
    return _allgather(tensors, _names(name, tensors), process_set)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> Handle:
    """Start what `allgather` does, without gradients; for `synchronize` or `poll`."""
    handle = groups.start_allgather(group_of(process_set), tensor, name)
    return Handle([handle], lambda: torch.cat(handle.wait()))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> Handle:
    """As `allgather_async`, of a list of tensors."""
    names = _names(name, tensors)
    handles = [allgather_async(*one, process_set) for one in zip(tensors, names, strict=True)]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def _names(name: str | None, tensors: Tensors) -> list[str | None]:
    return [None if name is None else f"{name}.{at}" for at in range(len(tensors))]


def _allgather(
    tensors: Tensors, names: Sequence[str | None], process_set: ProcessSet
) -> list[torch.Tensor]:
    group = group_of(process_set)
    mine: list[tuple[int, int, torch.Size]] = []  # where this rank's rows begin, and what they were

    def call(given: Tensors) -> Tensors:
        handles = [groups.start_allgather(group, *one) for one in zip(given, names, strict=True)]
        gathered = [handle.wait() for handle in handles]
        at = group.rank
        for parts, tensor in zip(gathered, given, strict=True):
            mine.append((sum(map(len, parts[:at])), len(parts[at]), tensor.shape))
        return [torch.cat(parts) for parts in gathered]

    def gradient(grads: Tensors) -> Tensors:
        reduced = grouped_allreduce(grads, process_set=process_set)
        of = zip(reduced, mine, strict=True)
        return [grad.narrow(0, at, rows).reshape(shape) for grad, (at, rows, shape) in of]

    return _differentiable(tensors, call, gradient)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Give each rank some of this rank's rows, and return those that others have for this one.

    Args:
        tensor: on the CPU or a CUDA device, of any dtype; only the first dimension may differ
            between ranks. Gradients pass through it.
        splits: how many rows go to each rank, in rank order, integers; None for equally many.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Returns:
        The received rows, in rank order; with `splits` also how many came from each rank, as a
        tensor.

    Raises:
        ConfigError: `splits` is not right for the tensor.
        MismatchError: shapes or dtypes do not fit together.
    """
    group = group_of(process_set)
    counts, shape = list[int](), list[int]()

    def call(given: Tensors) -> Tensors:
        received, counts[:] = groups.start_alltoall(group, given[0], splits, name).wait()
        shape[:] = given[0].shape
        return [received]

    def gradient(grads: Tensors) -> Tensors:
        back, _ = groups.start_alltoall(group, grads[0], counts, None).wait()
        unsent = back.new_zeros(shape[0] - len(back), *shape[1:])  # rows that went to nobody
        return [torch.cat([back, unsent])]

    (received,) = _differentiable([tensor], call, gradient)
    return _with_counts(splits, received, counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """Start what `alltoall` does, without gradients; for `synchronize` or `poll`."""
    handle = groups.start_alltoall(group_of(process_set), tensor, splits, name)
    return Handle([handle], lambda: _with_counts(splits, *handle.wait()))


def _with_counts(splits: Any, received: torch.Tensor, counts: list[int]) -> Any:
    if splits is None:
        return received
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
    return received, like.new_tensor(counts)


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
    there is a remainder.

    Raises:
        ConfigError: `op` is neither `Average` nor `Sum`, or the tensor is a scalar.
    """
    scales = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *scales)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As `reducescatter`, of a list of tensors."""
    given = op, process_set, prescale_factor, postscale_factor

    def call(tensors: Tensors) -> Tensors:
        return grouped_reducescatter_async(tensors, name, *given).wait()  # type: ignore[no-any-return]

    def gradient(grads: Tensors) -> Tensors:
        ranks = group_of(process_set).size if choose(op) is Op.SUM else 1
        scaled = [grad * (prescale_factor * postscale_factor * ranks) for grad in grads]
        return grouped_allgather(scaled, process_set=process_set)

    return compressed(compression, tensors, lambda narrow: _differentiable(narrow, call, gradient))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `reducescatter_async`, of a list of tensors."""
    group, scales = group_of(process_set), (prescale_factor, postscale_factor)

    def prepare(tensors: Tensors) -> list[torch.Tensor]:
        if choose(op) not in LINEAR:
            raise ConfigError("reducescatter takes op=hvd.Average or op=hvd.Sum")
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ConfigError("reducescatter takes tensors of one dimension or more, not scalars")
        return groups.copies(tensors)

    def finish() -> list[torch.Tensor]:
        return [one.tensor_split(group.size)[group.rank].clone() for one in reduction.wait()]

    reduction = groups.start_allreduce(group, tensors, name, (op, None), scales, prepare)
    return Handle([reduction], finish)


@_form_of(grouped_reducescatter_async)
def reducescatter_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    """Start what `reducescatter` does, without gradients; for `synchronize` or `poll`."""
    return _only(grouped_reducescatter_async([tensor], *args, **kwargs))
