"""The kernels: dtype x op x number of inputs, beside a chain of two-operand sums and reading alone.

`nbytes` are those of all inputs. They stay in the L2 cache (64 KiB each), or come from memory: 4
MiB each, the most that a chunk has, and every call has others.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import cycle
from operator import xor
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness import block8_oracle
from reducer import kernels
from reducer.wire.constants import MAX_CHUNK_BYTES, DType, ReduceOp

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.benchmark(max_time=0.2)

CACHED = 64 << 10  # bytes of an input: 8 of them and the output fit into 1 MiB
FROM_MEMORY = MAX_CHUNK_BYTES
COLD = 128 << 20  # bytes of all inputs, of which a call has some: no cache has this much left
INPUTS = (2, 4, 8)
PERIOD = 4096  # elements after which an input repeats, so that its fold is quickly checked
PERIOD_BLOCKS = PERIOD // block8_oracle.BYTES

# Of an input's elements in memory; of blocks, whose values NumPy has no type for, the bytes.
ELEMENTS: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.INT8: np.dtype(np.int8),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT8: np.dtype(np.uint8),
    DType.BLOCK8: np.dtype(np.uint8),
    DType.BLOCK8_E4M3: np.dtype(np.uint8),
}
BLOCKS = {DType.BLOCK8: "int8", DType.BLOCK8_E4M3: "fp8_e4m3"}
STEPS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def named(code: DType | ReduceOp) -> str:
    return code.name.lower()


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def shape(inputs: int, nbytes: int) -> str:
    return f"{inputs}x{size(nbytes)}".replace(" ", "")


OPS = [
    pytest.param(dtype, op, inputs, id=f"{named(dtype)}-{named(op)}-{shape(inputs, CACHED)}")
    for inputs in INPUTS
    for dtype in DType
    for op in ReduceOp
    if dtype.defines(op)
]
SHAPES = [
    pytest.param(inputs, nbytes, id=shape(inputs, nbytes))
    for nbytes in (CACHED, FROM_MEMORY)
    for inputs in INPUTS
]
GRADIENTS = pytest.mark.parametrize(
    "dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, *BLOCKS], ids=named
)


class Memory:
    """The inputs and outputs of a kernel.

    Args:
        dtype: element type.
        inputs: how many a call has.
        nbytes: size of each.

    Attributes:
        sets: inputs and output of one call after the other, as bytes; without end.
    """

    def __init__(self, dtype: DType, inputs: int, nbytes: int) -> None:
        self._dtype = dtype
        elements = ELEMENTS[dtype]
        rng = np.random.default_rng(0)
        if dtype.is_block:
            values = rng.standard_normal((inputs, PERIOD_BLOCKS * block8_oracle.VALUES))
            wire = BLOCKS[dtype]
            blocks = [block8_oracle.travels(row, wire) for row in values.astype(np.float32)]
            self._rows = np.stack(blocks).reshape(inputs, PERIOD)
        elif dtype.is_floating:
            self._rows = rng.standard_normal((inputs, PERIOD)).astype(elements)
        else:
            self._rows = rng.integers(0, 256, (inputs, PERIOD * elements.itemsize), np.uint8).view(
                elements
            )
        repeats = nbytes // (PERIOD * elements.itemsize)
        self.sets: Iterator[tuple[list[Array], Array]] = cycle(
            [
                (
                    [np.tile(row, repeats).view(np.uint8) for row in self._rows],
                    np.ones(nbytes, np.uint8),  # written, as memory is mapped by the first write
                )
                for _ in range(sets(inputs, nbytes))
            ]
        )

    def check(self, out: Array, op: ReduceOp, *, in_steps: bool = False) -> None:
        """Compare an output with NumPy's left fold.

        Args:
            out: the output.
            op: the reduction.
            in_steps: whether narrow elements are rounded after each input, and not once at the end.
        """
        if self._dtype.is_block:
            wire = BLOCKS[self._dtype]
            rows = [row.reshape(-1, block8_oracle.BYTES) for row in self._rows]
            total, rest = (rows[:2], rows[2:]) if in_steps else (rows, [])
            mean = op is ReduceOp.MEAN
            expected = reduce(
                lambda one, other: block8_oracle.folded([one, other], wire),
                rest,
                block8_oracle.folded(total, wire, mean=mean),
            )
            assert (out.reshape(-1, PERIOD) == expected.reshape(-1)).all()
            return
        elements = self._rows.dtype
        is_half = elements in {ELEMENTS[DType.FLOAT16], ELEMENTS[DType.BFLOAT16]}
        halves = self._rows.astype(np.float32) if is_half and not in_steps else self._rows
        fold: Array = reduce(STEPS[op], halves)
        if op is ReduceOp.MEAN:
            fold = fold / fold.dtype.type(len(self._rows))
        expected = fold.astype(elements).view(np.uint8)
        assert (out.reshape(-1, expected.size) == expected).all()


def sets(inputs: int, nbytes: int) -> int:
    """Return how many sets of inputs take turns."""
    return 1 if nbytes == CACHED else COLD // (inputs * nbytes)


def folding(variant: str | None, memory: Memory, dtype: DType, op: ReduceOp) -> Callable[[], Array]:
    """Return what folds the next inputs in one pass and returns the output."""
    fold = kernels.select(variant).reduce

    def fold_next() -> Array:
        inputs, out = next(memory.sets)
        fold(inputs, out, dtype, op)
        return out

    return fold_next


def describe(benchmark: BenchmarkFixture, dtype: DType, inputs: int, nbytes: int) -> None:
    """Say what is timed; sums of one shape, their chain and the reading of it are one group."""
    benchmark.group = f"kernels, {named(dtype)} sum of {inputs} x {size(nbytes)}"
    benchmark.extra_info["nbytes"] = inputs * nbytes


@pytest.mark.parametrize(("dtype", "op", "inputs"), OPS)
def test_op(benchmark: BenchmarkFixture, dtype: DType, op: ReduceOp, inputs: int) -> None:
    """Every dtype and op, by the best variant."""
    memory = Memory(dtype, inputs, CACHED)
    benchmark.group = f"kernels, {inputs} inputs, every dtype and op"
    benchmark.extra_info["nbytes"] = inputs * CACHED
    memory.check(benchmark(folding(None, memory, dtype, op)), op)


@pytest.mark.parametrize("variant", kernels.variants())
@GRADIENTS
@pytest.mark.parametrize(("inputs", "nbytes"), SHAPES)
def test_sum(
    benchmark: BenchmarkFixture, inputs: int, nbytes: int, dtype: DType, variant: str
) -> None:
    """One pass over all inputs, by every variant that this machine can run."""
    memory = Memory(dtype, inputs, nbytes)
    describe(benchmark, dtype, inputs, nbytes)
    out = benchmark(folding(variant, memory, dtype, ReduceOp.SUM))
    memory.check(out, ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=named)
@pytest.mark.parametrize(("inputs", "nbytes"), SHAPES)
def test_leaves(benchmark: BenchmarkFixture, inputs: int, nbytes: int, dtype: DType) -> None:
    """A tree over as many leaves as inputs, beside the chain that `test_sum` has."""
    memory, ends = Memory(dtype, inputs, nbytes), tuple(range(1, inputs + 1))
    add, pair = kernels.select().reduce_leaves, kernels.select().reduce

    def tree() -> Array:
        sources, out = next(memory.sets)
        add(sources, ends, out, dtype, ReduceOp.SUM)
        return out

    describe(benchmark, dtype, inputs, nbytes)
    out = benchmark(tree)
    rows, _ = next(memory.sets)
    while len(rows) > 1:
        both = [np.empty_like(rows[0]) for _ in rows[::2]]
        for at, target in enumerate(both):
            pair(rows[2 * at : 2 * at + 2], target, dtype, ReduceOp.SUM)
        rows = both
    assert (out == rows[0]).all()


@GRADIENTS
@pytest.mark.parametrize(("inputs", "nbytes"), SHAPES)
def test_chain(benchmark: BenchmarkFixture, inputs: int, nbytes: int, dtype: DType) -> None:
    """``out = x0 + x1; out += x2; ...``: a reducer that adds each input when it arrives."""
    memory = Memory(dtype, inputs, nbytes)
    add = kernels.select().reduce

    def chain() -> Array:
        sources, out = next(memory.sets)
        add(sources[:2], out, dtype, ReduceOp.SUM)
        for source in sources[2:]:
            add([out, source], out, dtype, ReduceOp.SUM)
        return out

    describe(benchmark, dtype, inputs, nbytes)
    memory.check(benchmark(chain), ReduceOp.SUM, in_steps=True)


@pytest.mark.parametrize("order", ["streams", "in_turn"])
@pytest.mark.parametrize(("inputs", "nbytes"), SHAPES)
def test_read(benchmark: BenchmarkFixture, inputs: int, nbytes: int, order: str) -> None:
    """The loads of a fold and an exclusive or, which no fold of these bytes can outrun.

    All inputs at once, as a kernel reads them, or one after the other.
    """
    compiled = pytest.importorskip("reducer.kernels._kernels")
    read: Callable[[list[Array]], int] = compiled.usable()[0].read_bytes
    rng = np.random.default_rng(0)
    words = [rng.integers(0, 1 << 64, nbytes // 8, np.uint64) for _ in range(inputs)]
    copies = cycle([[row.copy() for row in words] for _ in range(sets(inputs, nbytes))])

    def read_all() -> int:
        sources = next(copies)
        if order == "streams":
            return read(sources)
        return reduce(xor, [read([source]) for source in sources])

    describe(benchmark, DType.FLOAT32, inputs, nbytes)
    assert benchmark(read_all) == reduce(xor, map(np.bitwise_xor.reduce, words))
