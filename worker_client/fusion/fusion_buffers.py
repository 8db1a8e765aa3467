"""Fusion buffers: several tensors of one dtype and reduction, packed to be reduced as one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from worker_client.fusion.negotiation import Tensor

_KEPT = 4  # buffers that wait for their next use: enough for two in flight and two being filled
_SMALLEST = 1 << 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def group(
    tensors: Iterable[Tensor], threshold: int, rounded: Callable[[Tensor], bool]
) -> list[list[Tensor]]:
    """Say which tensors travel together; alike wherever order and threshold are.

    Args:
        tensors: what is to be reduced, in order.
        threshold: most bytes of a fusion buffer; what is larger travels alone.
        rounded: whether a tensor travels in 16 bits, which does not depend on its neighbours.

    Returns:
        Groups of one dtype and reduction each, rounded or not, in the order in which they are
        complete.
    """
    done: list[list[Tensor]] = []
    filling: dict[tuple[int, int, bool], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        _, dtype, op, nbytes = tensor
        if nbytes >= threshold:
            done.append([tensor])
            continue
        key = dtype, op, rounded(tensor)
        members, filled = filling.get(key, ([], 0))
        if filled + nbytes > threshold:
            done.append(members)
            members, filled = [], 0
        members.append(tensor)
        filling[key] = (members, filled + nbytes)
    return done + [members for members, _ in filling.values()]


class FusionBuffers:
    """Memory for fusion buffers, used again and again: fresh memory costs more than the copies."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return memory of at least `nbytes` bytes."""
        with self._lock:
            fitting = [at for at, memory in enumerate(self._free) if memory.size >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda at: self._free[at].size))
        return np.empty(max(_SMALLEST, 1 << (nbytes - 1).bit_length()), np.uint8)

    def give_back(self, memory: Bytes) -> None:
        """Take memory back that nothing reads or writes any more."""
        with self._lock:
            self._free = [*self._free, memory][-_KEPT:]
