"""Trainings that ranks may leave and join: what a step calls to let them in, with its state.

    client = worker_client.init(on_rank_lost="continue")          # join=True where one joins
    ...
    for step in range(steps):
        worker_client.elastic.sync(model, optimizer, step=step)   # every rank, between two steps

A newcomer's first call gives it the weights and the optimizer of the others.
"""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reducer.errors import LocalProtocolError, RankLostError
from worker_client.client.bootstrap import DEFAULT
from worker_client.collectives import broadcast_bytes

if TYPE_CHECKING:
    from worker_client.client.client import Client

_NOBODY = 1 << 40  # larger than any rank
_LENGTH = struct.Struct("<Q")  # of a rank's state: others may have larger ones


def sync(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    client: Client | None = None,
    **extra: Any,
) -> dict[str, Any] | None:
    """Let ranks in that wait to join, and give them the state of the lowest rank.

    Every rank calls it at the same point, between two steps. Where nobody waits it takes as long as
    a small all-reduce. A rank that has joined calls it before its first step.

    Args:
        module: whose parameters and buffers are sent; ranks that have joined load them.
        optimizer: whose state goes with them.
        client: the one to use; `worker_client.init()`'s by default.
        extra: what else the ranks have in common, such as the number of the step: Python's numbers,
            text, tensors, and lists and dicts of these. Also objects with a `state_dict`, such as
            a `worker_client.outer.OuterOptimizer` or a schedule of learning rates: ranks that have
            joined load their state.

    Returns:
        The lowest rank's `extra`, but for what has been loaded, if ranks have joined, at every
        rank; None if nobody has.

    Raises:
        LocalProtocolError: all ranks are lost that had the state.
        ConfigError, ReductionError: as `Client.admit` and `worker_client.collectives.broadcast`.
    """
    used = DEFAULT.get() if client is None else client
    newcomer = used.newcomer
    if not used.admit():
        return None
    loadable = {name: one for name, one in extra.items() if hasattr(one, "state_dict")}
    loadable |= {"": module} if optimizer is None else {"": module, "optimizer": optimizer}
    plain = {name: one for name, one in extra.items() if name not in loadable}
    state = _receive(used, None if newcomer else _save(loadable, plain))
    if newcomer:
        for name, one in loadable.items():
            one.load_state_dict(state["states"][name])
    found: dict[str, Any] = state["extra"]
    return found


def _save(loadable: dict[str, Any], extra: dict[str, Any]) -> bytes:
    saved = io.BytesIO()
    states = {name: one.state_dict() for name, one in loadable.items()}
    torch.save({"states": states, "extra": extra}, saved)
    return _LENGTH.pack(saved.getbuffer().nbytes) + saved.getvalue()


def _receive(client: Client, saved: bytes | None) -> dict[str, Any]:
    """Return the state of the lowest rank that has one; others may be lost meanwhile."""
    while True:
        # The lowest rank that has the state, as a number that its absence makes the largest.
        facts = np.array([_NOBODY if saved is None else client.rank, -len(saved or b"")], np.int64)
        client.all_reduce(facts, "min").wait()
        root, nbytes = int(facts[0]), -int(facts[1])
        if root == _NOBODY:
            raise LocalProtocolError("all ranks are lost that had the state of the training")
        mine = np.frombuffer((saved or b"").ljust(nbytes, b"\0"), np.uint8)
        try:
            sent = broadcast_bytes(client, mine, root, "the state of a training")
        except RankLostError as error:
            if error.rank != root:
                raise
            continue  # all ranks have found that out alike: the next one sends
        (length,) = _LENGTH.unpack_from(sent.data)
        state = io.BytesIO(sent[_LENGTH.size : _LENGTH.size + length].tobytes())
        loaded: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True)
        return loaded
