"""The same weights, the same optimizer and the same objects at every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reducer.errors import ConfigError
from reducer.wire.header import fingerprint
from worker_client.collectives import broadcast_bytes
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.groups import check_device, short, start_broadcast
from worker_client.horovod.job import CURRENT
from worker_client.horovod.objects import decode, encode
from worker_client.horovod.ops import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]
__all__ += ["allgather_object", "broadcast_object"]


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
) -> None:
    """Replace tensors by what they are at rank `root_rank`, bit for bit.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: the rank whose values they are to be.

    Raises:
        ConfigError: one is no tensor, or on a device that is not served; or there is no such rank.
        MismatchError: ranks disagree on the root, or on the tensors' names, and nothing has
            changed; or on a tensor's dtype or shape, and the other tensors are the root's.
        ReductionError: as `Client.all_reduce`.
    """
    job = CURRENT.job
    with job.call("broadcast_parameters", None) as wire:
        root = job.number(root_rank)
        keys = getattr(params, "items", None)
        listed: list[Any] = sorted(keys()) if keys is not None else list(params)
        named = [one if isinstance(one, tuple) else (str(at), one) for at, one in enumerate(listed)]
        for name, tensor in named:
            if not isinstance(tensor, torch.Tensor):
                raise ConfigError(
                    f"{name!r} is a {type(tensor).__name__}, not a tensor: pass "
                    "model.state_dict() without it, and use hvd.broadcast_object for it"
                )
            check_device(tensor)
        names = f"{len(named)} tensors, {fingerprint(chr(0).join(n for n, _ in named)):016x}"
    # First, so that nothing changes at any rank if one refuses its parameters, or has others.
    broadcast_bytes(job.client, np.zeros(0, np.uint8), root, names, name=wire)
    wait_for_all(
        [
            start_broadcast(job.client, tensor, root, short(f"{wire}.{at}.{name}"))
            for at, (name, tensor) in enumerate(named)
        ]
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001 (Horovod finds sparse parameters by it)
) -> None:
    """Give an optimizer the state and the options that it has at rank `root_rank`.

    It is made alike at every rank; at some it may have no state yet. `model` is not needed.

    Raises:
        ConfigError: it is L-BFGS, or its state contains what cannot be sent to other ranks.
        ReductionError: as `Client.all_reduce`.

    As with Horovod, gradients that an optimizer without state lacks are zeros afterwards.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("the state of torch.optim.LBFGS cannot be broadcast: use another one")
    mine = optimizer.state_dict()
    if not mine["state"]:  # Horovod makes a step with zeros then, and scripts read these gradients
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    received = broadcast_object(mine, root_rank, "optimizer_state")
    if received is not mine:
        optimizer.load_state_dict(received)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Return the object of rank `root_rank`; what others pass is ignored.

    Args:
        obj: None, numbers, strings, bytes, tensors, NumPy arrays, and lists, tuples, sets and
            dictionaries of such.
        root_rank: whose object it is, as ``hvd.rank()`` numbers it.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        ConfigError: it is of another type, at every rank alike.
        ReductionError: as `Client.all_reduce`.
    """
    group = group_of(process_set)
    client = group.client
    with group.call("broadcast_object", name) as wire:
        root = group.number(root_rank)
        is_root = root == client.rank
        payload = _pack(obj) if is_root else b""
    size = np.array([len(payload)]).view(np.uint8)
    (length,) = broadcast_bytes(client, size, root, "size of object", name=wire).view(np.int64)
    data = np.frombuffer(payload.ljust(length, b"\0"), np.uint8)
    data = broadcast_bytes(client, data, root, "object", name=f"{wire}.data")
    received = _unpack(root_rank, data.tobytes())
    return obj if is_root else received


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = ALL_RANKS
) -> list[Any]:
    """Return every rank's object, in rank order; arguments and errors as `broadcast_object`."""
    group = group_of(process_set)
    with group.call("allgather_object", name) as wire:
        payload = _pack(obj)
    payloads = group.gather(payload, wire).wait()
    return [_unpack(rank, one) for rank, one in enumerate(payloads)]


def _pack(value: Any) -> bytes:
    # A refusal travels like an object, so that every rank raises it and none waits.
    try:
        return encode([None, value])
    except ConfigError as error:
        return encode([str(error), None])


def _unpack(rank: int, payload: bytes) -> Any:
    refused, value = decode(payload)
    if refused is not None:
        raise ConfigError(f"rank {rank}: {refused}")
    return value
