"""How large chunks are: agreed on by all ranks through all-reduces of what they have measured.

Every rank must cut a buffer alike, but each measures another rate. So at certain calls, which are
the same at every rank, the slowest rank's rate is found with an all-reduce of its own.
"""

from __future__ import annotations

import struct

from reducer.wire.constants import DType, ReduceOp
from reducer.wire.layout import chunk_size
from worker_client.operation import Operation

FIRST_CALL = 3  # then twice as late each time
LAST_DOUBLING = 96  # from then on at every multiple of it
NAME = "what the links carry"  # compared like any other, so that no call is taken for a question

_RATE = struct.Struct("<q")


class ChunkTuner:
    """Says when to agree, and what the agreement means.

    Args:
        world_size: number of ranks.
        forced: size of all chunks, bytes; 0 to choose it.

    Attributes:
        chunk_bytes: size of chunks.
    """

    def __init__(self, world_size: int, forced: int) -> None:
        self._world_size = world_size
        self._forced = forced
        self._calls = 0
        self._buffer = bytearray(_RATE.size)
        self.reset()

    def reset(self) -> None:
        """Go back to what every rank begins with."""
        self.chunk_bytes = self._forced or chunk_size(0.0)

    def due(self) -> bool:
        """Count a call; whether ranks are to agree before it.

        Every call counts, whatever is asked for: ranks that disagree on that still count alike, and
        so their later calls have the same numbers.
        """
        if self._forced or self._world_size == 1:
            return False
        self._calls += 1
        turns, rest = divmod(self._calls, FIRST_CALL)
        return rest == 0 and (
            turns & (turns - 1) == 0
            if self._calls <= LAST_DOUBLING
            else self._calls % LAST_DOUBLING == 0
        )

    def question(self, rate: float, timeout_s: float) -> Operation:
        """Return the all-reduce that finds the slowest rank's rate.

        Args:
            rate: what this rank has measured, bytes per second.
            timeout_s: seconds until it fails.
        """
        self._buffer = bytearray(_RATE.pack(int(rate)))
        return Operation(memoryview(self._buffer), DType.INT64, ReduceOp.MIN, NAME, timeout_s)

    def answer(self) -> None:
        """Take the result of the latest question."""
        (rate,) = _RATE.unpack(self._buffer)
        self.chunk_bytes = chunk_size(rate)
