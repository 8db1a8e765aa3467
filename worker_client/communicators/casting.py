"""What is to be rounded travels in fewer bits, a large buffer as several all-reduces.

A float32 buffer is rounded to the wire's type, reducers sum in float32 and round once more, and the
result is cast back. A large buffer is cut into pieces, each an all-reduce of its own, so that the
first ones travel while others are cast; a tensor of a device comes in pieces already.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from reducer.errors import ReductionError
from worker_client.communicators.communicator import Communicator
from worker_client.protocol.operation import Operation
from worker_client.runtime.driver import AHEAD
from worker_client.staging import casts
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.split_call import submit_pieces

if TYPE_CHECKING:
    from reducer.wire.constants import DType

FLOAT_BYTES = 4
LARGE_BYTES = 8 << 20  # to be cut: casting it takes as long as a small all-reduce
# Sizes of the pieces, relative to each other. The network waits for the cast of the first, and
# while one travels there is time to cast another one that is twice as large.
PIECES = (1, 2, 4, 8, 8, 8, 8, 8, 8, 8)
_KEPT = 4  # memory of calls that have ended, for those to come ...
_KEPT_CALLS = 64  # ... unless that many have had no use for it


class CastingCommunicator(Communicator):
    """Casts what is `rounded` to a wire dtype, and passes on what is not.

    With `whole` it cuts no buffer: each all-reduce must be all or nothing, whichever rank is lost.
    """

    def __init__(self, inner: Communicator, wire_dtype: DType, *, whole: bool) -> None:
        self.inner = inner
        self._wire_dtype = wire_dtype
        self._whole = whole
        self._casts = casts.select()
        self._memory = BufferPool(_allocate, most=_KEPT, turns=_KEPT_CALLS)

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce; of what is rounded this thread casts what is to travel first."""
        if not operation.rounded:
            self._memory.skip()
            self.inner.submit(operation)
            return
        wire = self._memory.take(self._wire_dtype.nbytes(operation.view.nbytes // FLOAT_BYTES))

        def release(_: object) -> None:
            self._memory.give_back(wire)

        try:
            pieces = self._pieces(operation, wire)
            filled = AHEAD if self.inner.takes_unfilled else None
            submit_pieces(operation, pieces, self.inner.submit, release, filled=filled)
        except ReductionError:
            release(None)
            raise

    def _pieces(self, operation: Operation, wire: memoryview) -> list[Operation]:
        itemsize = self._wire_dtype.itemsize
        float_bytes = FLOAT_BYTES * self._wire_dtype.values  # of those of an element
        size = len(wire) // itemsize
        large = operation.view.nbytes >= LARGE_BYTES
        pieces_of = PIECES if large and not (self._whole or operation.cut) else (1,)
        count, whole = len(pieces_of), sum(pieces_of)
        bounds = [size * upto // whole for upto in accumulate(pieces_of, initial=0)]
        pieces = []
        for at, (start, end) in enumerate(pairwise(bounds), 1):
            floats = slice(float_bytes * start, float_bytes * end)  # the last ones may be fewer
            values, part = operation.view[floats], wire[itemsize * start : itemsize * end]
            kept = None if operation.residual is None else operation.residual[floats]
            piece = Operation(
                part,
                self._wire_dtype,
                operation.op,
                # Other numbers of values may fill as many blocks.
                f"{operation.name or 'all-reduce'}, piece {at} of {count}, of "
                f"{operation.view.nbytes} bytes in all",
                operation.timeout_s,
                call=operation.call or operation,
                write_back=partial(self._casts.widen, part, values, self._wire_dtype),
            )
            piece.fill = partial(self._narrow, values, part, kept)
            pieces.append(piece)
        return pieces

    def _narrow(self, values: memoryview, wire: memoryview, kept: memoryview | None) -> None:
        if kept is None:
            self._casts.narrow(values, wire, self._wire_dtype)
        else:
            self._casts.narrow_keeping(values, kept, wire, self._wire_dtype)


def _allocate(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data
