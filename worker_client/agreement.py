"""What ranks agree on as they go: the reducers in use, and how large chunks are.

Every rank must cut a buffer alike, but each measures another rate, and learns at another time that
a reducer is back. So at certain calls, which are the same at every rank, they find out with an
all-reduce of its own: the slowest rank's rate counts, and the reducers that every rank can use.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from reducer.wire.constants import PLACES, DType, ReduceOp
from reducer.wire.layout import chunk_size
from worker_client.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_CALL = 3  # then twice as late each time
EVERY = 96  # from then on at every multiple of it
NAME = "what the links carry"  # compared like any other, so that no call is taken for a question


class Agreement:
    """Says when to agree, and what the agreement means.

    Args:
        needed: whether there is anything to agree on.
        forced: size of all chunks, bytes; 0 to choose it.
        reducers: number of them.

    Attributes:
        every: so many calls are between agreements in the long run.
        chunk_bytes: size of chunks.
    """

    def __init__(self, needed: bool, forced: int, reducers: int) -> None:
        self.every = EVERY
        self._needed = needed
        self._forced = forced
        self._asked = 0  # number after the latest call before which ranks were to agree
        self._layout = struct.Struct(f"<{1 + reducers}q")
        self._buffer = bytearray(self._layout.size)
        self.reset()

    def reset(self) -> None:
        """Go back to the chunks that every rank begins with."""
        self.chunk_bytes = self._forced or chunk_size(0.0)

    def due(self, sequence: int) -> bool:
        """Whether ranks are to agree before the call of this all-reduce, and have not been asked.

        Calls count, whatever is asked for: ranks that disagree on that still count alike.
        """
        call = sequence // PLACES + 1
        if not self._needed or call <= self._asked:
            return False
        turns, rest = divmod(call, FIRST_CALL)
        return rest == 0 and (
            turns & (turns - 1) == 0 if call <= self.every else call % self.every == 0
        )

    def question(self, rate: float, usable: Sequence[bool], before: Operation) -> Operation:
        """Return the all-reduce that finds what all ranks can do.

        Args:
            rate: what this rank's links carry, as measured, bytes per second.
            usable: which reducers it can use.
            before: the first all-reduce of the call that waits for it.
        """
        call = before.sequence // PLACES
        self._asked = call + 1
        self._buffer = bytearray(self._layout.pack(int(rate), *usable))
        view = memoryview(self._buffer)
        question = Operation(view, DType.INT64, ReduceOp.MIN, NAME, before.timeout_s)
        question.sequence = call * PLACES
        return question

    def answer(self) -> list[bool]:
        """Take the result of the latest question: which reducers every rank can use."""
        rate, *usable = self._layout.unpack(self._buffer)
        self.chunk_bytes = self._forced or chunk_size(rate)
        return [bool(all_can) for all_can in usable]
