"""All-reduces of tensors in place, which joined ranks take part in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reducer.errors import ConfigError
from worker_client._packing import Pack, kinds
from worker_client.horovod.groups import part_of, short
from worker_client.horovod.ops import Handle, Op, divides, on_the_wire, scale_
from worker_client.staging.arguments import parse_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.horovod.groups import Group
    from worker_client.work import Work


class Asked(NamedTuple):
    """A reduction that a caller asks for.

    Attributes:
        targets: contributions, and places of the results.
        result: what `synchronize` shall return.
        op: the reduction.
    """

    targets: Sequence[torch.Tensor]
    result: Any
    op: Op


def start(
    group: Group,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    scales: tuple[float, float],
    ask: Callable[[], Asked],
) -> Handle:
    """Start a reduction of tensors in place, those of one dtype packed together.

    Args:
        group: the ranks that take part.
        tensors: what the caller gave.
        name: the same at every rank; None takes a number.
        scales: factors before and after the reduction.
        ask: checks the caller's arguments; if it raises, the other ranks hear of it.

    Raises:
        ConfigError: there are no tensors, or one cannot be reduced.
    """
    dtypes = {getattr(tensor, "dtype", None) for tensor in tensors}
    with group.call("allreduce", name, max(1, len(dtypes))) as base:
        targets, result, op = ask()
        if not targets:
            raise ConfigError("a group has no tensors: pass a list of at least one")
        reduction = parse_op(on_the_wire(op, targets[0].dtype))
        packs = group.client.packs(kinds(targets), reduction)
        packed_as = [[targets[place].detach() for place in pack] for pack in packs]
    works: list[Work] = []
    ends: list[Callable[[], None]] = []
    for at, members in enumerate(packed_as):
        pack = Pack(members) if len(members) > 1 else None
        packed = members[0] if pack is None else pack.buffer
        try:
            shapes = short(" ".join(str(tuple(member.shape)) for member in members))
            work, end = _start_one(group, packed, part_of(base, at), op, scales, shapes)
        except BaseException as error:  # of this part the others hear from the client
            for later in range(at + 1, len(packed_as)):
                group.client.decline(error, name=part_of(base, later))
            raise
        works.append(work)
        ends.append(end)
        if pack is not None:
            ends.append(pack.unpack)

    def finish() -> Any:
        for end in ends:
            end()
        return result

    return Handle(works, finish)


def _start_one(
    group: Group,
    flat: torch.Tensor,
    name: str,
    op: Op,
    scales: tuple[float, float],
    shapes: str,
) -> tuple[Work, Callable[[], None]]:
    """Start one all-reduce; return what to wait for, and what to call then."""
    before, after = scales
    scale_(flat, before)
    work = group.client.all_reduce(flat, on_the_wire(op, flat.dtype), name=name, shape=shapes)

    def finish() -> None:
        if divides(op, flat.dtype):
            flat.div_(group.size, rounding_mode="trunc")
        scale_(flat, after)

    return work, finish


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that has no history.

    Raises:
        ConfigError: the tensor is sparse.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError("a sparse tensor cannot be reduced: use tensor.to_dense()")
    return tensor.detach().clone(memory_format=torch.contiguous_format)
