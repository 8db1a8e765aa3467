"""Collectives that are made of all-reduces: every rank adds its bytes to others' zeros.

They move more bytes than collectives of their own would, and are for what is small or rare: names,
sizes, a model's first weights. All ranks call them in the same order, as they do `all_reduce`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import ConfigError, RankLostError
from worker_client.host_buffer import host_buffer

if TYPE_CHECKING:
    from worker_client.client import Client


def broadcast(client: Client, data: Any, root: int = 0) -> None:
    """Replace `data` at every rank by what it is at rank `root`, bit for bit.

    Args:
        client: the job's.
        data: NumPy array or torch tensor, of the same size at every rank; in place. One on a device
            is waited for.
        root: the rank whose data it is to be.

    Raises:
        ConfigError: there is no such rank, or `data` is not supported.
        RankLostError: the job goes on without that rank.
        ReductionError: as `Client.all_reduce`.
    """
    if not 0 <= root < client.world_size:
        raise ConfigError(f"root {root} is not a rank of a world of size {client.world_size}")
    buffer = host_buffer(data)
    view = np.frombuffer(buffer.view, np.uint8)
    sent = np.zeros(view.size + 1, np.uint8)
    if client.rank == root:
        sent[:-1], sent[-1] = view, 1
    client.all_reduce(sent, "sum").wait()
    if not sent[-1]:  # the others go on without it
        raise RankLostError(f"rank {root}, whose data was to be sent, is lost", rank=root)
    view[:] = sent[:-1]
    if buffer.write_back is not None:
        buffer.write_back()


def all_gather_bytes(client: Client, payload: bytes, *, name: str | None = None) -> list[bytes]:
    """Return every rank's payload, in rank order; they may differ in length.

    Args:
        client: the job's.
        payload: this rank's.
        name: the same at every rank, as `Client.all_reduce` takes it.

    Raises:
        ReductionError: as `Client.all_reduce`.
    """
    lengths = np.zeros(client.world_size, np.int64)
    lengths[client.rank] = len(payload)
    client.all_reduce(lengths, "sum", name=name and f"{name}.lengths").wait()
    ends = np.cumsum(lengths)
    everything = np.zeros(int(ends[-1]), np.uint8)
    mine = slice(int(ends[client.rank]) - len(payload), int(ends[client.rank]))
    everything[mine] = np.frombuffer(payload, np.uint8)
    client.all_reduce(everything, "sum", name=name).wait()
    return [everything[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]
