"""Which tensors travel in fewer bits than they have, by a rule that is the same at every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reducer.errors import ConfigError
from reducer.wire.constants import DType, ReduceOp
from worker_client.staging.host_buffer import host_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALLEST_BYTES = 16 << 10  # smaller ones gain nothing, and often are losses, norms or counts
# Gradients below are copied to travel in one call, each in blocks of its own: that takes less of a
# processor than a call for each.
ALONE_BYTES = 256 << 10
WIRE_DTYPES = {
    "none": None,
    "bf16": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "int8": DType.BLOCK8,
    "fp8_e4m3": DType.BLOCK8_E4M3,
}
_CAST_OPS = {ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX}  # factors' errors would grow


class WireRule:
    """What float32 tensors travel as: FLOAT16, BFLOAT16, a type of blocks; None for themselves.

    Attributes:
        setting: what `REDUCTION_WIRE_DTYPE` says for it.
        apart: whether what is rounded is packed with nothing else. A block has one scale: its
            values would depend on what is packed beside them, which is a matter of time.
    """

    def __init__(self, wire_dtype: DType | None) -> None:
        self.wire_dtype = wire_dtype
        self.setting = next(name for name, dtype in WIRE_DTYPES.items() if dtype is wire_dtype)
        self.apart = wire_dtype is not None and wire_dtype.is_block

    def packs(self, tensors: Sequence[tuple[DType, int]], op: ReduceOp) -> list[list[int]]:
        """Return which tensors may be packed into one buffer; `Client.packs` says the rest."""
        rounded = [self.rounds(dtype, op, nbytes) for dtype, nbytes in tensors]
        groups: dict[tuple[DType, bool], list[list[int]]] = {}
        for at, (dtype, nbytes) in enumerate(tensors):
            members = groups.setdefault((dtype, rounded[at]), [[]])
            filled = sum(tensors[member][1] for member in members[-1])
            begins = self.apart if rounded[at] else self.rounds(dtype, op, filled + nbytes)
            if begins and members[-1]:
                members.append([])
            members[-1].append(at)
        return [group for members in groups.values() for group in members]

    def rounds(self, dtype: DType, op: ReduceOp, nbytes: int) -> bool:
        """Whether a tensor of so many bytes is rounded; nothing else decides that."""
        return (
            self.wire_dtype is not None
            and dtype is DType.FLOAT32
            and nbytes >= SMALLEST_BYTES
            and op in _CAST_OPS
            and self.wire_dtype.defines(op)
        )

    def residual(self, residual: Any, dtype: DType, nbytes: int) -> memoryview:
        """Return the memory in which what the cast of so many bytes takes away is kept.

        Raises:
            ConfigError: nothing is cast, or `residual` does not go with the data.
        """
        if self.wire_dtype is None:
            raise ConfigError(
                "residual= keeps what the cast takes away, and nothing is cast: set "
                "REDUCTION_WIRE_DTYPE=bf16 (or wire_dtype='bf16'), or leave it out"
            )
        try:
            kept = host_buffer(residual)
        except ConfigError as error:
            raise ConfigError(f"residual=: {error}") from None
        if kept.dtype is not DType.FLOAT32 or kept.write_back is not None:
            raise ConfigError(
                "residual= takes a contiguous float32 array or tensor of zeros, in host memory "
                "whatever the data are in"
            )
        if dtype is not DType.FLOAT32 or kept.view.nbytes != nbytes:
            raise ConfigError("residual= goes with float32 data of its own size")
        return kept.view
