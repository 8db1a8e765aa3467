"""Which of torch.distributed's collectives reducers can do, and how these become all-reduces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo  # torch.distributed's, typed

from worker_client._packing import Pack, kinds
from worker_client.staging.host_buffer import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Work

    from reducer.wire.constants import ReduceOp
    from worker_client.client.client import Client

# Torch takes any of them but the CPU for where a group's tensors are to be. Counting devices does
# not keep children that are forked from using them, as `is_available()` may.
DEVICES = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]
OPS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max", "PRODUCT": "product"}
_DTYPES = {getattr(torch, name) for name in DTYPES}


class Reduction(NamedTuple):
    """A collective as all-reduces.

    Attributes:
        buffers: what is all-reduced, in this order, in place.
        results: the tensors that hold the result at the end.
        finish: fills `results` from `buffers`; None if they are the same.
    """

    buffers: list[torch.Tensor]
    results: list[torch.Tensor]
    finish: Callable[[], None] | None = None


def op_name(op: Any) -> str:
    """Return the name of a torch.distributed.ReduceOp, such as ``"SUM"``."""
    return str(op.op.name)


def reducible(tensors: Sequence[torch.Tensor], op: Any) -> bool:
    """Whether reducers can do this, by what is alike at all ranks."""
    name = op_name(op)
    return (
        name in OPS
        and bool(tensors)
        and all(
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.dtype in _DTYPES
            and (name != "AVG" or tensor.dtype.is_floating_point)
            for tensor in tensors
        )
    )


def packed(tensors: list[torch.Tensor], client: Client, op: ReduceOp) -> Reduction:
    """Return the reduction of tensors in place, packed where each travels as it would alone."""
    places = client.packs(kinds(tensors), op)
    packs = [Pack([tensors[at].detach() for at in group]) for group in places]

    def unpack() -> None:
        for pack in packs:
            pack.unpack()

    return Reduction([pack.buffer for pack in packs], tensors, unpack)


def scattered(
    outputs: list[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], rank: int
) -> Reduction:
    """Return the reduction of inputs of which each rank keeps its own.

    The whole is reduced: reducers send every result to all ranks.

    Args:
        outputs: one per collective, of the shape of this rank's input.
        inputs: for each of them one tensor per rank; left as they are.
        rank: this rank.
    """
    packs = [Pack([one.detach() for one in per_rank]) for per_rank in inputs]

    def keep() -> None:
        for output, pack in zip(outputs, packs, strict=True):
            output.detach().copy_(pack.parts[rank].view(output.shape))

    return Reduction([pack.buffer for pack in packs], outputs, keep)


def take_in(group: ProcessGroup, gloo: ProcessGroupGloo) -> None:
    """Let Gloo do what this group does not do itself, on all devices."""
    if torch.__version__ < "2.14":  # later ones warn that it does nothing
        gloo._set_sequence_number_for_group()  # noqa: SLF001 (this, and what follows, as torch does)
    for device in DEVICES:
        kind = ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device(device), kind, gloo)  # noqa: SLF001
    group._set_default_backend(kind)  # noqa: SLF001


def asked(options: Any, given: Any, timeout: timedelta | None) -> Any:
    """Return what is asked for, of which torch takes either options or an operation."""
    if isinstance(given, type(options)):
        options = given
    elif given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options


def either(group: ProcessGroup, new: str, old: str) -> Callable[..., Work]:
    """Return a method that torch calls by another name since 2.13."""
    method: Callable[..., Work] = getattr(group, new, None) or getattr(group, old)
    return method


def inner(name: str, old: str = "") -> Any:
    """Return a method that does what the group in ``self._inner`` does under this name."""

    def delegate(self: Any, *given: Any, **options: Any) -> Work:
        return either(self._inner, name, old)(*given, **options)

    return delegate
