"""What calls and elastic functions raise, by Horovod's names."""

from __future__ import annotations

from reducer.errors import ReductionError as HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Ranks have left or joined: `run` begins again, with `skip_sync` without a sync of states."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("ranks have left or joined")
        self.skip_sync = skip_sync
