"""All-gather and reduce-scatter, as Horovod has them.

They are made of all-reduces, and move more bytes than collectives of their own would: for metrics,
not for every step.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.horovod.allreduce import allreduce
from worker_client.horovod.broadcasting import as_bytes
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Compression, Handle, Op, choose
from worker_client.horovod.reduction import Asked, dense_copy, start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.horovod.ops import Compressor


# -- all-gather ---------------------------------------------------------------------------------


def gather_rows(tensor: torch.Tensor, name: str | None) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order; their first dimensions may differ.

    Raises:
        ConfigError: another dimension or the dtype differs, at every rank alike.
    """
    with CURRENT.job.call("allgather", name) as wire:
        rows = dense_copy(tensor).reshape(1 if tensor.dim() == 0 else tensor.shape)
        dtype = str(rows.dtype).encode()
        head = struct.pack(f"<BB{rows.dim()}q", len(dtype), rows.dim(), *rows.shape) + dtype
        payload = head + as_bytes(rows).numpy().tobytes()
    payloads = CURRENT.job.gather(payload, wire)
    parts = []
    for rank, payload in enumerate(payloads):
        length, dims = payload[0], payload[1]
        shape = struct.unpack_from(f"<{dims}q", payload, 2)
        at = 2 + 8 * dims
        if payload[at : at + length] != dtype or shape[1:] != rows.shape[1:]:
            theirs = payload[at : at + length].decode()
            raise ConfigError(
                f"allgather: rank {rank} has {theirs} of shape {shape}, rank {CURRENT.rank()} "
                f"{rows.dtype} of shape {tuple(rows.shape)}: only the first dimension may differ"
            )
        values = bytearray(payload[at + length :])
        flat = torch.frombuffer(values, dtype=torch.uint8) if values else as_bytes(rows)[:0]
        parts.append(flat.view(rows.dtype).view(shape))
    return parts


class _AllGather(torch.autograd.Function):
    """All-gather whose gradient is the average of all ranks', of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        parts = gather_rows(tensor, name)
        ctx.shape = tensor.shape
        ctx.first = sum(part.shape[0] for part in parts[: CURRENT.rank()])
        ctx.rows = parts[CURRENT.rank()].shape[0]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return allreduce(grads[0]).narrow(0, ctx.first, ctx.rows).reshape(ctx.shape), None


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return all ranks' tensors, one after the other along the first dimension.

    Args:
        tensor: CPU tensor of any dtype; only the first dimension may differ between ranks.
            Gradients pass through it.
        name: the same at every rank; by default numbered.

    Raises:
        ConfigError: shapes or dtypes do not fit together.
    """
    gathered: torch.Tensor = _AllGather.apply(tensor, name)  # type: ignore[no-untyped-call]
    return gathered


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """As `allgather`; sizes are not known beforehand, so it is done when this returns."""
    gathered = torch.cat(gather_rows(tensor, name))
    return Handle([], lambda: gathered)


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None) -> list[Any]:
    """As `allgather`, of a list of tensors."""
    return [allgather(tensor, _numbered(name, at)) for at, tensor in enumerate(tensors)]


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None) -> Handle:
    """As `allgather_async`, of a list of tensors."""
    gathered = [torch.cat(gather_rows(t, _numbered(name, at))) for at, t in enumerate(tensors)]
    return Handle([], lambda: gathered)


def _numbered(name: str | None, at: int) -> str | None:
    return None if name is None else f"{name}.{at}"


# -- reduce-scatter -----------------------------------------------------------------------------


def _own_rows(reduced: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the first dimension; the first ranks have what is left over."""
    rank, size = CURRENT.rank(), CURRENT.size()
    each, over = divmod(reduced.shape[0], size)
    return reduced.narrow(0, each * rank + min(rank, over), each + (rank < over)).clone()


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter whose gradient is all ranks' rows, gathered."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, scales: tuple[float, float]
    ) -> torch.Tensor:
        def ask() -> Asked:
            chosen = choose(op)
            if chosen not in {Op.AVERAGE, Op.SUM}:
                raise ConfigError("reducescatter takes op=hvd.Average or op=hvd.Sum")
            ctx.factor = scales[0] * scales[1] * (CURRENT.size() if chosen is Op.SUM else 1)
            copy = dense_copy(tensor)
            return Asked([copy], copy, chosen)

        return _own_rows(start([tensor], name, scales, ask).wait())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return allgather(grads[0] * ctx.factor), None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction; arguments as `allreduce`.

    Rows are those of the first dimension, divided equally; the first ranks have one more each if
    there is a remainder.

    Raises:
        ConfigError: `op` is neither `Average` nor `Sum`.
    """
    narrow, ctx = compression.compress(tensor)
    rows = _ReduceScatter.apply(narrow, name, op, (prescale_factor, postscale_factor))  # type: ignore[no-untyped-call]
    return compression.decompress(rows, ctx)
