"""All-reduces of tensors in place, announced to ranks that have joined."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.arguments import parse_op
from worker_client.horovod.announcements import Call, Kind, short
from worker_client.horovod.handles import Handle
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Op, divides, on_the_wire, scale_
from worker_client.host_buffer import find_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.client import Client
    from worker_client.work import Work


def _start_one(
    client: Client, flat: torch.Tensor, name: str, op: Op, scales: tuple[float, float]
) -> tuple[Work, Callable[[], None]]:
    """Start one all-reduce; return what to wait for, and what to call then."""
    before, after = scales
    scale_(flat, before)
    work = client.all_reduce(flat, on_the_wire(op, flat.dtype), name=name)

    def finish() -> None:
        if divides(op, flat.dtype):
            flat.div_(client.world_size, rounding_mode="trunc")
        scale_(flat, after)

    return work, finish


def start(
    targets: Sequence[torch.Tensor],
    result: Any,
    name: str | None,
    op: Op,
    scales: tuple[float, float],
    *,
    announced: bool = False,
) -> Handle:
    """Announce and start a reduction of tensors in place, those of one dtype packed together.

    Args:
        targets: contributions, and places of the results.
        result: what `synchronize` shall return.
        name: the same at every rank; None takes a number.
        op: the reduction.
        scales: factors before and after it.
        announced: whether the caller has told joined ranks of it.

    Raises:
        ConfigError: there are no tensors, or one cannot be reduced.
    """
    job = CURRENT.job
    if not targets:
        raise ConfigError("a group has no tensors: pass a list of at least one")
    base = f"allreduce.{f'noname.{job.announcements.calls}' if name is None else name}"
    kinds = [(find_dtype(str(t.dtype).removeprefix("torch.")), t.nbytes) for t in targets]
    groups = job.client.packs(kinds, parse_op(on_the_wire(op, targets[0].dtype)))
    works: list[Work] = []
    ends: list[Callable[[], None]] = []
    for at, group in enumerate(groups):
        members = [targets[place].detach() for place in group]
        wire = short(base if len(groups) == 1 else f"{base}.{at}")
        packed = members[0] if len(members) == 1 else torch.cat([m.reshape(-1) for m in members])
        if not announced:
            element, _ = kinds[group[0]]
            call = Call(Kind.ALL_REDUCE, wire, op, element, packed.numel())
            works += job.announcements.make(call)
        work, end = _start_one(job.client, packed, wire, op, scales)
        works.append(work)
        ends.append(end)
        if len(members) > 1:
            ends.append(partial(_unpack, packed, members))

    def finish() -> Any:
        for end in ends:
            end()
        return result

    return Handle(works, finish)


def _unpack(packed: torch.Tensor, members: list[torch.Tensor]) -> None:
    parts = torch.split(packed, [member.numel() for member in members])
    for member, part in zip(members, parts, strict=True):
        member.copy_(part.view(member.shape))


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that has no history.

    Raises:
        ConfigError: the tensor is sparse.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError("a sparse tensor cannot be reduced: use tensor.to_dense()")
    return tensor.detach().clone(memory_format=torch.contiguous_format)
