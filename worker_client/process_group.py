"""What torch.distributed knows of a job, if the process uses it: ranks, and a store to meet in."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from reducer.errors import ReductionTimeout
from worker_client import config

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

_STORE_TIMEOUT_S = 60.0
_joined = [0]  # calls of `current` so far; the same number at every rank, so it names a meeting


class ProcessGroup:
    """One meeting of all ranks of the default process group.

    Attributes:
        rank, world_size: as torch.distributed has them.
    """

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store

    def share(self, topic: str, value: str) -> None:
        """Publish this rank's value."""
        self._store.set(f"{topic}/{self.rank}", value)

    def read(self, topic: str, rank: int) -> str:
        """Wait for a rank's value and return it.

        Raises:
            ReductionTimeout: it did not come within a minute.
        """
        key = f"{topic}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=_STORE_TIMEOUT_S))
        except RuntimeError:
            raise ReductionTimeout(
                f"rank {rank} did not call worker_client.init() within {_STORE_TIMEOUT_S:g} s: "
                "call it, or attach(), on every rank",
                missing=(rank,),
            ) from None
        return bytes(self._store.get(key)).decode()

    def gather(self, topic: str, value: str) -> list[str]:
        """Publish this rank's value and return those of all ranks, in rank order."""
        self.share(topic, value)
        return [self.read(topic, rank) for rank in range(self.world_size)]


def private_group(timeout_s: float) -> dist.ProcessGroup:
    """Make a group of all ranks that nothing else uses; every rank calls this at the same point.

    Args:
        timeout_s: bounds everything done with it, seconds.
    """
    import torch.distributed as dist  # noqa: PLC0415 (as below)

    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def current() -> ProcessGroup | None:
    """Return the initialised default process group, or None (torch is not imported for it)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    import torch.distributed as dist  # noqa: PLC0415 (only where torch is in use anyway)

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import (  # noqa: PLC0415
        PrefixStore,
        _get_default_store,
    )

    _joined[0] += 1
    # torchrun keeps one store over all its restarts.
    start = config.launch().torchelastic_restart_count
    store = PrefixStore(f"reduction/{start}/{_joined[0]}", _get_default_store())
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), store)
