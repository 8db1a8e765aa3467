"""What ranks agree on as they go: the reducers in use, and how large chunks are.

Every rank must cut a buffer alike, but each measures another rate, and learns at another time that
a reducer is back. So before certain calls, which are the same at every rank, they find out with an
all-reduce of its own: the slowest rank's rate counts, and the reducers that every rank can use.

A reducer that is back is to be in use within two seconds, whether a job makes one call in that time
or thousands. But no two clocks are the same. So a rank that could use one more also asks before
calls that it chooses by its own clock. If every rank asks there, they agree; if one has gone on
without, its reducer declines the question, and nothing was lost but a round trip. Ranks choose
multiples of powers of two, and so meet where the slowest one asks.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from reducer.wire.constants import PLACES, DType, ReduceOp
from reducer.wire.layout import (
    LARGEST_CHUNK,
    MEASURED_BYTES,
    SMALLEST_CHUNK,
    chunk_size,
    chunk_size_of,
)
from worker_client.protocol.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_CALL = 3  # then twice as late each time
EVERY = 96  # from then on at every multiple of it
OFTEN_S = 0.4  # between questions of a rank that could use one more reducer
_OLD, _NEW = 0.75, 0.25  # weights in the mean time between calls
NAME = "what the links carry"  # compared like any other, so that no call is taken for a question


class Agreement:
    """Says when to agree, and what the agreement means.

    Args:
        needed: whether there is anything to agree on.
        fixed: size of all chunks, bytes; 0 to choose it.
        reducers: number of them.

    Attributes:
        every: so many calls are between agreements in the long run.
        wanted: whether this rank could use a reducer that is not in use.
        chunk_bytes: size of the chunks of large buffers.
    """

    def __init__(self, needed: bool, fixed: int, reducers: int) -> None:
        self.every = EVERY
        self.wanted = False
        self._called_at = 0.0  # when the latest call was made, in seconds of the caller's clock,
        self._call = 0  # its number,
        self._between_s = 0.0  # the time since the one before, and the mean of such times
        self._mean_s = 0.0
        self._needed = needed
        self._fixed = fixed
        self._asked = 0  # number after the latest call before which ranks were to agree
        self._layout = struct.Struct(f"<{1 + reducers}q")
        self._buffer = bytearray(self._layout.size)
        self.reset()

    def reset(self) -> None:
        """Go back to the chunks that every rank begins with."""
        self._measure(0)

    def chunk_bytes_of(self, total_bytes: int, shard_count: int) -> int:
        """Return the size of the chunks of a buffer of `total_bytes`, cut into so many shards."""
        if self._fixed:
            return self._fixed
        # What is smaller measures no links, and would have short chunks for ever on fast ones.
        if self._rate == 0 and total_bytes < MEASURED_BYTES:
            return SMALLEST_CHUNK
        return chunk_size_of(total_bytes, shard_count, chunk_size(self._rate))

    def called(self, call: int, now: float) -> None:
        """Record when a call is made; calls may have been made since the latest one recorded."""
        self._between_s = (now - self._called_at) / max(1, call - self._call)
        self._called_at, self._call = now, call
        self._mean_s = _OLD * self._mean_s + _NEW * self._between_s

    def due(self, sequence: int) -> bool:
        """Whether ranks are to agree before the call of this all-reduce, and have not been asked.

        Calls count, whatever is asked for: ranks that disagree on that still count alike.
        """
        call = sequence // PLACES + 1
        if not self._needed or call <= self._asked:
            return False
        if self.wanted and call % self._often() == 0:
            return True
        if call > self.every:
            return call % self.every == 0
        turns, rest = divmod(call, FIRST_CALL)
        return rest == 0 and turns & (turns - 1) == 0

    def next_due(self, sequence: int) -> float:
        """Return the first number after this one for which `due` may say yes, if none is wanted."""
        if not self._needed:
            return math.inf
        call = sequence // PLACES + 1
        every = FIRST_CALL if call < self.every else self.every
        return ((call // every + 1) * every - 1) * PLACES

    def _often(self) -> int:
        """Return the largest power of two of calls that this rank makes in `OFTEN_S`, or 1."""
        calls = OFTEN_S / max(self._between_s, self._mean_s, OFTEN_S / self.every)
        return 1 << (max(1, int(calls)).bit_length() - 1)

    def begin_round(self, rate: float, usable_lanes: Sequence[int], before: Operation) -> Operation:
        """Return the all-reduce that finds what all ranks can do.

        Args:
            rate: what this rank's links carry, as measured, bytes per second.
            usable_lanes: how many of each reducer it can use.
            before: the first all-reduce of the call that waits for it.
        """
        call = before.sequence // PLACES
        self._asked = call + 1
        self._buffer = bytearray(self._layout.pack(int(rate), *usable_lanes))
        view = memoryview(self._buffer)
        agreement = Operation(view, DType.INT64, ReduceOp.MIN, NAME, before.timeout_s)
        agreement.sequence = call * PLACES
        return agreement

    def answer(self) -> list[int]:
        """Take the result of the latest question: the lanes of each that every rank can use."""
        rate, *usable_lanes = self._layout.unpack(self._buffer)
        self._measure(rate)
        return [max(lanes, 0) for lanes in usable_lanes]  # no rank has sent less than 0

    def _measure(self, rate: int) -> None:
        """Choose chunks for links that carry so many bytes per second, 0 if nobody knows."""
        self._rate = rate
        self.chunk_bytes = self._fixed or min(LARGEST_CHUNK, chunk_size(rate))
