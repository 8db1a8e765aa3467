"""Broadcast, as Horovod has it, and a barrier; a rank that has joined cannot take part.

They are made of all-reduces, to which others than the root contribute zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from reducer.errors import ConfigError
from worker_client.collectives import Broadcast
from worker_client.horovod.allreduce import allreduce
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Handle
from worker_client.horovod.reduction import dense_copy


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor of any dtype, sharing its memory."""
    # A dimension of one element, or of none, may have any stride, and is contiguous all the same.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def check(tensor: torch.Tensor) -> None:
    """Refuse what cannot be broadcast.

    Raises:
        ConfigError: the tensor is not in this machine's memory.
    """
    if tensor.device.type != "cpu":
        raise ConfigError(f"a tensor on {tensor.device} cannot be broadcast: use tensor.cpu()")


def start_broadcast(tensor: torch.Tensor, root: int, wire: str) -> Handle:
    """Start a broadcast in place, of the rank that is the client's `root`, which is called `wire`.

    Raises:
        ReductionError: as `Client.all_reduce`.
    """
    client = CURRENT.job.client
    target = tensor.detach()
    data = target.contiguous()
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
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        received: torch.Tensor = broadcast_async(tensor, root_rank, name).wait()
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = allreduce(grads[0])
        return grad if CURRENT.rank() == ctx.root_rank else grad.zero_(), None, None


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start to replace a tensor by what it is at rank `root_rank`, bit for bit.

    Args:
        tensor: CPU tensor of any dtype, of the same shape at every rank.
        root_rank: the rank whose values it is to be.
        name: the same at every rank; by default numbered.

    Raises:
        ConfigError: there is no such rank, or the tensor is not supported.

    `Handle.wait` raises MismatchError at every rank if they disagree on the root, the dtype or the
    shape; the tensor is as it was then.
    """
    with CURRENT.job.call("broadcast", name) as wire:
        root = CURRENT.job.number(root_rank)
        check(tensor)
    return start_broadcast(tensor, root, wire)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """As `broadcast_async_`, into a new tensor."""
    with CURRENT.job.call("broadcast", name) as wire:
        copy = dense_copy(tensor)
        root = CURRENT.job.number(root_rank)
        check(copy)
    return start_broadcast(copy, root, wire)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """As `broadcast_async_`, and wait for it."""
    received: torch.Tensor = broadcast_async_(tensor, root_rank, name).wait()
    return received


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """As `broadcast_`, into a new tensor, through which gradients pass."""
    received: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-untyped-call]
    return received


def barrier() -> None:
    """Wait until every rank has called it."""
    with CURRENT.job.call("barrier", None) as wire:
        data = torch.zeros(1, dtype=torch.uint8)
    CURRENT.job.client.all_reduce(data, "max", name=wire).wait()
