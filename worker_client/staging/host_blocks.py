"""Page-locked memory that is used again: to lock pages takes longer than to fill them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

KEPT_FOR = 1024  # takes; DDP's buckets come back every step, but that of the first step never does


class HostBlocks:
    """Blocks by their size in bytes; what element type they hold matters to nobody.

    Any thread may use it.

    Args:
        allocate: makes a block of so many bytes.

    Attributes:
        used_bytes: size of what is lent out.
        idle_bytes: size of what waits to be lent out again.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self.used_bytes = 0
        self.idle_bytes = 0
        self._allocate = allocate
        self._idle: deque[tuple[int, torch.Tensor]] = deque()  # and since which take, ascending
        self._takes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.Tensor:
        """Lend out a block of exactly this size, the one that was given back last if there is one.

        Raises:
            DeviceError: there is no memory for another one.
        """
        with self._lock:
            self._takes += 1
            found = self._find(nbytes)
            while self._idle and self._takes - self._idle[0][0] > KEPT_FOR:
                self.idle_bytes -= self._idle.popleft()[1].nbytes
            self.used_bytes += nbytes
        if found is not None:
            return found
        try:
            return self._allocate(nbytes)
        except BaseException:
            self.forget(nbytes)
            raise

    def give_back(self, block: torch.Tensor) -> None:
        """Take back a block which nothing reads or writes any more."""
        with self._lock:
            self.used_bytes -= block.nbytes
            self.idle_bytes += block.nbytes
            self._idle.append((self._takes, block))

    def forget(self, nbytes: int) -> None:
        """Do without a block of this size that something may still read or write."""
        with self._lock:
            self.used_bytes -= nbytes

    def _find(self, nbytes: int) -> torch.Tensor | None:
        for at in range(len(self._idle) - 1, -1, -1):
            block = self._idle[at][1]
            if block.nbytes == nbytes:
                del self._idle[at]
                self.idle_bytes -= nbytes
                return block
        return None
