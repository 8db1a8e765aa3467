"""All-gather and all-to-all, as Horovod has them.

They are made of all-reduces, and move more bytes than collectives of their own would: for metrics,
not for every step.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError, MismatchError
from worker_client.horovod.allreduce import grouped_allreduce
from worker_client.horovod.broadcasting import as_bytes
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import Handle
from worker_client.horovod.reduction import dense_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.horovod.groups import Group

_HEAD = struct.Struct("<BBB")  # bytes of the dtype's name, dimensions, ranks if there are splits


class _Rows:
    """What a rank has said in a gather: rows of a dtype and a shape, and to whom they go.

    Args:
        payload: as `_payload` made it.

    Attributes:
        shape: of the rows.
        splits: how many go to each rank; none in an all-gather.
        what: dtype and dimensions but for the first one, which all ranks must have in common.
    """

    def __init__(self, payload: bytes) -> None:
        length, dims, ranks = _HEAD.unpack_from(payload)
        numbers = struct.unpack_from(f"<{dims + ranks}q", payload, _HEAD.size)
        self.shape, self.splits = numbers[:dims], numbers[dims:]
        at = _HEAD.size + 8 * len(numbers)
        self._dtype = payload[at : at + length].decode()
        self._values = bytearray(payload[at + length :])
        self.what = self._dtype, self.shape[1:]

    def __str__(self) -> str:
        return f"{self._dtype} of shape {self.shape}"

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return the rows, of the dtype and on the device of another tensor."""
        if not self._values:
            return like.new_empty(self.shape)
        rows = torch.frombuffer(self._values, dtype=torch.uint8).view(like.dtype).view(self.shape)
        return rows.to(like.device)


def _payload(rows: torch.Tensor, splits: Sequence[int] = ()) -> bytes:
    dtype = str(rows.dtype).encode()
    head = _HEAD.pack(len(dtype), rows.dim(), len(splits))
    numbers = struct.pack(f"<{rows.dim() + len(splits)}q", *rows.shape, *splits)
    return head + numbers + dtype + as_bytes(rows).cpu().numpy().tobytes()


def _received(kind: str, group: Group, payloads: list[bytes]) -> list[_Rows]:
    """Return what each rank has said.

    Raises:
        MismatchError: that does not fit together, at every rank alike.
    """
    said = [_Rows(payload) for payload in payloads]
    mine = said[group.rank]
    for rank, rows in enumerate(said):
        if rows.what != mine.what:
            what = f"{kind}, in which only the first dimension may differ"
            one, other = (group.rank, str(mine)), (rank, str(rows))
            raise MismatchError.between(what, "dtype or shape", one, other)
    return said


# -- all-gather ---------------------------------------------------------------------------------


def start_gather(group: Group, tensor: torch.Tensor, name: str | None) -> Handle:
    """Start to gather every rank's tensor; the handle has a list of them, in rank order.

    Their first dimensions may differ.
    """
    with group.call("allgather", name) as wire:
        rows = dense_copy(tensor).reshape(1 if tensor.dim() == 0 else tensor.shape)
        payload = _payload(rows)
    gathering = group.gather(payload, wire)

    def finish() -> list[torch.Tensor]:
        said = _received("allgather", group, gathering.wait())
        return [one.tensor(rows) for one in said]

    return Handle([gathering], finish)


def _start_gathers(group: Group, tensors: Sequence[torch.Tensor], name: str | None) -> list[Handle]:
    names = [None if name is None else f"{name}.{at}" for at in range(len(tensors))]
    return [start_gather(group, one, its) for one, its in zip(tensors, names, strict=True)]


class _AllGather(torch.autograd.Function):
    """All-gathers whose gradients are the average of all ranks', of this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, start: Callable[[], list[Handle]], process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set, ctx.mine = process_set, []
        rank = group_of(process_set).rank
        gathered = []
        for handle, tensor in zip(start(), tensors, strict=True):
            parts = handle.wait()
            first = sum(part.shape[0] for part in parts[:rank])
            ctx.mine.append((first, parts[rank].shape[0], tensor.shape))
            gathered.append(torch.cat(parts))
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        reduced = grouped_allreduce(grads, process_set=ctx.process_set)
        mine = zip(reduced, ctx.mine, strict=True)
        return None, None, *(g.narrow(0, at, rows).reshape(shape) for g, (at, rows, shape) in mine)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> torch.Tensor:
    """Return all ranks' tensors, one after the other along the first dimension.

    Args:
        tensor: on the CPU or a CUDA device, of any dtype; only the first dimension may differ
            between ranks. Gradients pass through it.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        MismatchError: shapes or dtypes do not fit together.
    """

    def start() -> list[Handle]:
        return [start_gather(group_of(process_set), tensor, name)]

    (gathered,) = _AllGather.apply(start, process_set, tensor)  # type: ignore[no-untyped-call]
    return gathered  # type: ignore[no-any-return]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> Handle:
    """Start what `allgather` does, without gradients; for `synchronize` or `poll`."""
    handle = start_gather(group_of(process_set), tensor, name)
    return Handle([handle], lambda: torch.cat(handle.wait()))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> list[Any]:
    """As `allgather`, of a list of tensors."""

    def start() -> list[Handle]:
        return _start_gathers(group_of(process_set), tensors, name)

    return list(_AllGather.apply(start, process_set, *tensors))  # type: ignore[no-untyped-call]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> Handle:
    """As `allgather_async`, of a list of tensors."""
    handles = _start_gathers(group_of(process_set), tensors, name)
    return Handle(handles, lambda: [torch.cat(handle.wait()) for handle in handles])


# -- all-to-all ---------------------------------------------------------------------------------


def _split(group: Group, rows: int, splits: Any) -> list[int]:
    """Return how many rows go to each rank.

    Raises:
        ConfigError: the splits are not right for so many rows.
    """
    if splits is None:
        if rows % group.size:
            raise ConfigError(
                f"{rows} rows cannot be divided among {group.size} ranks equally: give splits="
            )
        return [rows // group.size] * group.size
    given = torch.as_tensor(splits)
    if given.dtype not in {torch.int32, torch.int64} or given.dim() != 1:
        raise ConfigError(f"splits= must be a list, or a tensor, of integers, got {splits}")
    counts: list[int] = given.tolist()
    if len(counts) != group.size or min(counts) < 0 or sum(counts) > rows:
        raise ConfigError(
            f"splits= must be {group.size} numbers of rows, of {rows} in all at most, got {counts}"
        )
    return counts


def _start_alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> Handle:
    """Start an all-to-all; the handle has the parts that this rank receives, in rank order."""
    group = group_of(process_set)
    with group.call("alltoall", name) as wire:
        rows = dense_copy(tensor)
        if rows.dim() == 0:
            raise ConfigError("alltoall takes tensors of one dimension or more: use reshape(1)")
        payload = _payload(rows, _split(group, rows.shape[0], splits))
    gathering = group.gather(payload, wire)

    def finish() -> list[torch.Tensor]:
        parts = []
        for one in _received("alltoall", group, gathering.wait()):
            begin = sum(one.splits[: group.rank])
            parts.append(one.tensor(rows)[begin : begin + one.splits[group.rank]])
        return parts

    return Handle([gathering], finish)


def _as_asked(received: torch.Tensor, counts: list[int], splits: Any) -> Any:
    """Return what an all-to-all returns: how many rows came from each rank if there are splits."""
    if splits is None:
        return received
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
    return received, like.new_tensor(counts)


class _AllToAll(torch.autograd.Function):
    """All-to-all whose gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: Any,
        name: str | None,
        process_set: ProcessSet,
        counts: list[int],
    ) -> torch.Tensor:
        parts = _start_alltoall(tensor, splits, name, process_set).wait()
        counts.extend(len(part) for part in parts)
        given = group_of(process_set)
        ctx.counts, ctx.process_set = counts, process_set
        ctx.left = tensor.shape[0] - sum(_split(given, tensor.shape[0], splits))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        parts = _start_alltoall(grads[0], ctx.counts, None, ctx.process_set).wait()
        unsent = grads[0].new_zeros(ctx.left, *grads[0].shape[1:])
        return torch.cat([*parts, unsent]), None, None, None, None


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Handle:
    """Start what `alltoall` does, without gradients; for `synchronize` or `poll`."""
    handle = _start_alltoall(tensor, splits, name, process_set)

    def finish() -> Any:
        parts = handle.wait()
        return _as_asked(torch.cat(parts), [len(part) for part in parts], splits)

    return Handle([handle], finish)


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
    counts: list[int] = []
    received = _AllToAll.apply(tensor, splits, name, process_set, counts)  # type: ignore[no-untyped-call]
    return _as_asked(received, counts, splits)
