"""What torch.distributed knows of a job, if the process uses it: ranks, and a store to meet in."""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from reducer.errors import ReductionTimeout
from reducer.wire.constants import MAX_JOB_NAME_BYTES
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

STORE_TIMEOUT_S = 60.0
_joined = [0]  # calls of `current` so far; the same number at every rank, so it names a meeting


class ProcessGroup:
    """One meeting of all ranks of a process group.

    Args:
        rank, world_size: as torch.distributed has them.
        store: which all ranks share, and nobody else writes to.
        name: what the job is called in addition, if it is one of several of the same name.
        timeout_s: how long to wait for a rank that has not come yet, seconds.
        make_private: makes a group of the same ranks that nothing else uses, at the same point in
            every rank; what is done with it takes as many seconds at most as it is given.

    Attributes:
        rank, world_size, name: as given.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        make_private: Callable[[float], dist.ProcessGroup],
        name: str = "",
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.make_private = make_private
        self._store = store
        self._timeout_s = timeout_s

    def named(self, job: str) -> str:
        """Return the name of this group's own job, if `job` is what all of them are called."""
        own = f"{job}.{self.name}" if self.name else job
        if len(own.encode()) <= MAX_JOB_NAME_BYTES - len(config.NAMED):
            return own
        return hashlib.sha256(own.encode()).hexdigest()

    def share(self, topic: str, value: str) -> None:
        """Publish this rank's value."""
        self._store.set(f"{topic}/{self.rank}", value)

    def read(self, topic: str, rank: int) -> str:
        """Wait for a rank's value and return it.

        Raises:
            ReductionTimeout: it did not come in time.
        """
        key = f"{topic}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError:
            raise ReductionTimeout(
                f"rank {rank} did not join the job within {self._timeout_s:g} s: call "
                "worker_client.init(), or attach(), on every rank",
                missing=(rank,),
            ) from None
        return bytes(self._store.get(key)).decode()

    def gather(self, topic: str, value: str) -> list[str]:
        """Publish this rank's value and return those of all ranks, in rank order."""
        self.share(topic, value)
        return [self.read(topic, rank) for rank in range(self.world_size)]


def _private_group(timeout_s: float) -> dist.ProcessGroup:
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ProcessGroup(rank, world_size, store, make_private=_private_group)
