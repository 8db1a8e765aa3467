from collections.abc import Sequence

from reducer.kernels.plain import BytesLike
from reducer.wire.constants import DType, ReduceOp

class CompiledKernels:
    def __init__(self, place: int) -> None: ...
    @property
    def name(self) -> str: ...
    def reduce(
        self, inputs: Sequence[BytesLike], out: BytesLike, dtype: DType, op: ReduceOp
    ) -> None: ...
    def reduce_leaves(
        self,
        inputs: Sequence[BytesLike],
        ends: Sequence[int],
        out: BytesLike,
        dtype: DType,
        op: ReduceOp,
    ) -> None: ...
    def read_bytes(self, inputs: Sequence[BytesLike]) -> int: ...

def usable() -> list[CompiledKernels]: ...
