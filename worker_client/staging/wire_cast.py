"""From a caller's buffer to what travels: as it is, or rounded to 16 bits piece by piece.

A float32 buffer is rounded to the wire's type, reducers sum in float32 and round once more, and the
result is cast back. A large buffer is cut into pieces, each an all-reduce of its own, so that the
first ones travel while others are cast.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import ConfigError
from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import Operation
from worker_client.staging import casts
from worker_client.staging.buffer_pool import BufferPool
from worker_client.staging.host_buffer import host_buffer
from worker_client.staging.split_call import Call, Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker_client.staging.arguments import Arguments
    from worker_client.staging.casts import Array
    from worker_client.staging.host_buffer import HostBuffer
    from worker_client.work import Work

SMALLEST_BYTES = 16 << 10  # smaller ones gain nothing, and often are losses, norms or counts
LARGE_BYTES = 8 << 20  # to be cut: casting it takes as long as a small all-reduce
PIECES = 8  # the network waits for the cast of the first, and the caller for that of the last
WIRE_DTYPES = {"none": None, "bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}
_CAST_OPS = {ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX}  # factors' errors would grow
_KEPT = 4  # memory of calls that have ended, for those to come ...
_KEPT_CALLS = 64  # ... unless that many have had no use for it


class WireCast:
    """Makes the calls of one client.

    Args:
        wire_dtype: what float32 travels as; None for itself.
        whole: do not cut buffers: each call must be all or nothing, whoever is lost meanwhile.

    """

    def __init__(self, wire_dtype: DType | None, *, whole: bool) -> None:
        self.wire_dtype = wire_dtype
        self._whole = whole
        self._casts = casts.select()
        self._memory = BufferPool(_allocate, most=_KEPT, turns=_KEPT_CALLS)

    def call(self, call: object, work: Work, asked: Arguments) -> Call:
        """Make a call; `Operation` says what `call` is.

        Raises:
            ConfigError: `weight` or `residual` does not go with the others.
        """
        buffer, op, name, timeout_s, data, weight, residual, rounded = asked
        kept = None if residual is None else self._residual(residual, buffer)
        if weight is not None:
            self._check_weight(weight, buffer.dtype, op)
        own = name
        pieces: list[Piece] = []
        scale = None if weight in {None, 1.0} else weight
        if weight is not None:
            total = np.array([weight], np.float64)
            own = name or "a weighted mean"
            what = f"{own}: weight"
            view = total.view(np.uint8).data
            operation = Operation(view, DType.FLOAT64, ReduceOp.MEAN, what, timeout_s, call=call)
            operation.data_bytes = 0
            pieces.append(Piece(operation))
            buffer = self._divided(buffer, total)
            own = f"{own}: weighted"
        release = None
        if rounded is None:
            rounded = self.rounds(buffer.dtype, op, buffer.view.nbytes)
        if rounded:
            wire = self._memory.take(buffer.view.nbytes // 2)
            release = partial(self._give_back, wire)
            pieces += self._cast(
                call, buffer, wire, op, name=own, timeout_s=timeout_s, scale=scale, kept=kept
            )
        else:
            self._memory.skip()
            prepare = None if scale is None else partial(_scale, buffer.view, buffer.dtype, scale)
            operation = Operation(buffer.view, buffer.dtype, op, own, timeout_s, call=call)
            pieces.append(Piece(operation, prepare))
        return Call(work, data, pieces, name=name, write_back=buffer.write_back, release=release)

    # -- casts --------------------------------------------------------------------------------

    def packs(self, tensors: Sequence[tuple[DType, int]], op: ReduceOp) -> list[list[int]]:
        """Say which tensors may be packed into one buffer, so that each travels as it would alone.

        Args:
            tensors: dtype and bytes of each.
            op: reduction of all of them.

        Returns:
            Their places, in groups of one dtype.
        """
        rounded = [self.rounds(dtype, op, nbytes) for dtype, nbytes in tensors]
        groups: dict[tuple[DType, bool], list[list[int]]] = {}
        for at, (dtype, nbytes) in enumerate(tensors):
            members = groups.setdefault((dtype, rounded[at]), [[]])
            filled = sum(tensors[member][1] for member in members[-1])
            if not rounded[at] and self.rounds(dtype, op, filled + nbytes) and members[-1]:
                members.append([])
            members[-1].append(at)
        return [group for members in groups.values() for group in members]

    def rounds(self, dtype: DType, op: ReduceOp, nbytes: int) -> bool:
        """Whether a tensor of so many bytes travels in 16 bits; nothing else decides that."""
        return (
            self.wire_dtype is not None
            and dtype is DType.FLOAT32
            and nbytes >= SMALLEST_BYTES
            and op in _CAST_OPS
        )

    def _cast(
        self,
        call: object,
        buffer: HostBuffer,
        wire: memoryview,
        op: ReduceOp,
        *,
        name: str | None,
        timeout_s: float,
        scale: float | None,
        kept: memoryview | None,
    ) -> Iterator[Piece]:
        dtype = self.wire_dtype
        assert dtype is not None
        size = len(wire) // 2
        large = buffer.view.nbytes >= LARGE_BYTES and not self._whole
        pieces = PIECES if large else 1
        bounds = [size * at // pieces for at in range(pieces + 1)]
        for at, (start, end) in enumerate(pairwise(bounds), 1):
            values, part = buffer.view[4 * start : 4 * end], wire[2 * start : 2 * end]
            rest = None if kept is None else kept[4 * start : 4 * end]
            what = f"{name or 'all-reduce'}, piece {at} of {pieces}"
            operation = Operation(part, dtype, op, what, timeout_s, call=call)
            operation.data_bytes = len(values)
            yield Piece(
                operation,
                prepare=partial(self._narrow, values, part, scale, rest),
                finish=partial(self._casts.widen, part, values, dtype),
            )

    def _narrow(
        self, values: memoryview, wire: memoryview, scale: float | None, kept: memoryview | None
    ) -> None:
        assert self.wire_dtype is not None
        if scale is not None:
            _scale(values, DType.FLOAT32, scale)
        if kept is None:
            self._casts.narrow(values, wire, self.wire_dtype)
        else:
            self._casts.narrow_keeping(values, kept, wire, self.wire_dtype)

    def _give_back(self, wire: memoryview, _error: object) -> None:
        self._memory.give_back(wire)

    # -- what is refused ----------------------------------------------------------------------

    def _residual(self, residual: Any, buffer: HostBuffer) -> memoryview:
        if self.wire_dtype is None:
            raise ConfigError(
                "residual= keeps what the cast to 16 bits takes away, and nothing is cast: set "
                "REDUCTION_WIRE_DTYPE=bf16 (or wire_dtype='bf16'), or leave it out"
            )
        kept = host_buffer(residual)
        if kept.dtype is not DType.FLOAT32 or kept.write_back is not None:
            raise ConfigError("residual= takes a contiguous float32 array or tensor of zeros")
        if buffer.dtype is not DType.FLOAT32 or kept.view.nbytes != buffer.view.nbytes:
            raise ConfigError("residual= goes with float32 data of its own size")
        return kept.view

    def _check_weight(self, weight: float, dtype: DType, op: ReduceOp) -> None:
        check_weight(weight)
        if op is not ReduceOp.MEAN:
            raise ConfigError("weight= makes a weighted mean: use op='mean'")
        if dtype not in casts.FLOATS:
            raise ConfigError(
                f"weight= goes with float32 and float64, got {dtype.name.lower()}: convert the "
                "data to float32 (and set REDUCTION_WIRE_DTYPE to send 16 bits)"
            )
        if self._whole:
            raise ConfigError(
                "weight= cannot be combined with on_rank_lost='continue': a rank could be lost "
                "between the weights' all-reduce and the data's"
            )

    def _divided(self, buffer: HostBuffer, total: Array) -> HostBuffer:
        write_back = buffer.write_back

        def divide() -> None:
            mean = float(total[0])
            if mean == 0.0:
                raise ConfigError("all ranks' weights are 0: give at least one above 0")
            self._casts.divide(buffer.view, mean, buffer.dtype)
            if write_back is not None:
                write_back()

        return buffer._replace(write_back=divide)


def _allocate(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


def check_weight(weight: object) -> None:
    """Refuse what is no weight.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    number = isinstance(weight, (int, float, np.integer, np.floating))
    if not number or isinstance(weight, bool) or not 0 <= float(weight) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"weight= takes a finite number of at least 0, got {weight!r}")


def _scale(values: memoryview, dtype: DType, weight: float) -> None:
    """Multiply by a weight in place; a rank with weight 0 has nothing to say, not even a NaN."""
    numbers = np.frombuffer(values, casts.FLOATS[dtype])
    if weight == 0.0:
        numbers.fill(0)
        return
    with np.errstate(all="ignore"):
        np.multiply(numbers, numbers.dtype.type(weight), out=numbers)
