"""Broadcast, as Horovod has it, and a barrier; a rank that has joined cannot take part.

They are made of all-reduces, to which others than the root contribute zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.collectives import Broadcast
from worker_client.horovod.allreduce import allreduce
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import Handle
from worker_client.horovod.reduction import dense_copy
from worker_client.staging.host_buffer import DEVICES

if TYPE_CHECKING:
    from worker_client.client.client import Client


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor of any dtype, sharing its memory."""
    # A dimension of one element, or of none, may have any stride, and is contiguous all the same.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check(tensor: torch.Tensor) -> None:
    """Refuse what cannot be broadcast.

    Raises:
        ConfigError: the tensor is neither on the CPU nor on a CUDA device.
    """
    if tensor.device.type not in DEVICES:
        raise ConfigError(f"a tensor on {tensor.device} cannot be broadcast: use tensor.cpu()")


def start_broadcast(client: Client, tensor: torch.Tensor, root: int, wire: str) -> Handle:
    """Start a broadcast in place, of the rank that is the client's `root`, which is called `wire`.

    Raises:
        ReductionError: as `Client.all_reduce`.
    """
    target = tensor.detach()
    data = target.contiguous().cpu()  # in place, of a contiguous one in host memory
    what = f"{data.dtype} {tuple(data.shape)}"
    one = Broadcast(client, as_bytes(data).numpy(), root, what)
    work = client.all_reduce(one.sent, "sum", name=wire)

    def finish() -> torch.Tensor:
        as_bytes(data).numpy()[:] = one.received()
        if data.data_ptr() != target.data_ptr():
            target.copy_(data)
        return tensor

    return Handle([work], finish)


class _Broadcast(torch.autograd.Function):
    """Broadcast whose gradient is the average of all ranks' at the root, and zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.process_set = process_set
        received: torch.Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        group = group_of(process_set)
        ctx.is_root = group.number(root_rank) == group.client.rank
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = allreduce(grads[0], process_set=ctx.process_set)
        return grad if ctx.is_root else grad.zero_(), None, None, None


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """Start to replace a tensor by what it is at rank `root_rank`, bit for bit.

    Args:
        tensor: on the CPU or a CUDA device, of any dtype, and of the same shape at every rank.
        root_rank: the rank whose values it is to be, as ``hvd.rank()`` numbers it.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        ConfigError: there is no such rank, or the tensor is not supported.

    `Handle.wait` raises MismatchError at every rank if they disagree on the root, the dtype or the
    shape; the tensor is as it was then.
    """
    group = group_of(process_set)
    with group.call("broadcast", name) as wire:
        root = group.number(root_rank)
        check(tensor)
    return start_broadcast(group.client, tensor, root, wire)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """As `broadcast_async_`, into a new tensor."""
    group = group_of(process_set)
    with group.call("broadcast", name) as wire:
        copy = dense_copy(tensor)
        root = group.number(root_rank)
        check(copy)
    return start_broadcast(group.client, copy, root, wire)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> torch.Tensor:
    """As `broadcast_async_`, and wait for it."""
    received: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return received


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> torch.Tensor:
    """As `broadcast_`, into a new tensor, through which gradients pass."""
    received: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return received


def barrier(process_set: ProcessSet = ALL_RANKS) -> None:
    """Wait until every rank has called it."""
    group = group_of(process_set)
    with group.call("barrier", None) as wire:
        data = torch.zeros(1, dtype=torch.uint8)
    group.client.all_reduce(data, "max", name=wire).wait()
