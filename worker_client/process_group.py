"""What torch.distributed knows of a job, if the process uses it: ranks, and a store to meet in."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from reducer.errors import ReductionTimeout
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

_STORE_TIMEOUT_S = 60.0
_joined = [0]  # calls of `current` so far; the same number at every rank, so it names a meeting


class ProcessGroup:
    """One meeting of all ranks of the default process group, or of some of them.

    Attributes:
        rank, world_size: as torch.distributed has them, or among those who meet.
        ranks: what the default process group calls those who meet.
        suffix: for names of jobs: what tells a part from others; empty for all ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], store: Store, suffix: str = "") -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self.ranks = tuple(ranks)
        self.suffix = suffix
        self._store = store

    def part(self, ranks: Sequence[int]) -> ProcessGroup:
        """Return the meeting of some, this one among them; each is in one part of a meeting.

        Args:
            ranks: as the default process group calls them, in the order of the part.
        """
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 (as below)

        store = PrefixStore(f"part/{ranks[0]}", self._store)
        rank = list(ranks).index(self.ranks[self.rank])
        return ProcessGroup(rank, ranks, store, f"-{ranks[0]}")

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
                f"rank {self.ranks[rank]} did not call worker_client.init() within "
                f"{_STORE_TIMEOUT_S:g} s: call it, or attach(), on every rank",
                missing=(self.ranks[rank],),
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
    return ProcessGroup(dist.get_rank(), range(dist.get_world_size()), store)
