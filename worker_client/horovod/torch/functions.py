"""The same weights and the same optimizer at every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reducer.errors import ConfigError
from reducer.wire.header import fingerprint
from worker_client.collectives import broadcast_bytes
from worker_client.horovod.broadcasting import check, start_broadcast
from worker_client.horovod.groups import short
from worker_client.horovod.job import CURRENT
from worker_client.horovod.objects import allgather_object, broadcast_object
from worker_client.horovod.ops import wait_for_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


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
            check(tensor)
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

    Args:
        optimizer: made alike at every rank; at some it may have no state yet.
        root_rank: the rank whose state it is to be.
        model: not needed.

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
