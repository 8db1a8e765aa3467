"""The kernels against the memory: one pass, the two-operand chain, NumPy, and reading alone.

    python -m pytest --benchmark-only bench/

Every contender works on the same 8 inputs (and one output) in turn, round after round, so that a
noisy machine is unkind to all of them alike; the figures are medians. All of them count bytes of
input: ``8 * size / time``. What they are:

- **one pass**: `Kernels.reduce` of the best variant, all 8 inputs at once.
- **chain**: the same kernels on two operands, ``out = x0 + x1; out += x2; ...`` as a reducer does
  that adds each contribution when it arrives.
- **fresh**: that chain with every partial sum in a buffer of its own, ``t1 = x0 + x1; t2 = t1 + x2;
  ...``, as code does that may not overwrite.
- **numpy**: `np.add` in a chain (for bfloat16, which it lacks, the NumPy twin of our kernels).
- **read**: the same variant's loads with nothing but an exclusive or, over the same inputs, either
  in the kernels' order (8 streams at once) or one buffer after the other, whichever is faster. No
  fold can be faster than that; it also has to write.
- **memcpy**: each input copied to the output, bytes of input too.

The last test holds the median ratios of fp32 inputs that do not fit in a cache against their bars.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_benchmark.fixture import BenchmarkFixture

    from reducer.kernels.plain import Array

INPUTS = 8
ROUNDS = 9
SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20]  # bytes per input
OUT_OF_CACHE = 4 << 20  # 8 such inputs and their output are larger than a 32 MiB cache
BAR_READ = 0.85  # one pass over read, fp32
# One pass over chain, fp32. The chain moves 8 inputs, reads the output 6 times and writes it 7
# times, where one pass moves 8 inputs and writes once; a write costs 1 to 2 reads (a line is
# fetched before its first write). So memory allows at most 22 / 10 = 2.2.
BAR_CHAIN = 1.7

DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),
}


@dataclass(frozen=True)
class Figures:
    """Bytes of input per second, in GB/s, of every contender in one run."""

    dtype: DType
    size: int
    one_pass: float
    chain: float
    fresh: float
    numpy: float
    read: float
    memcpy: float


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[Figures]]:
    """Collect what the tests measure, and print it after the last one."""
    measured: list[Figures] = []
    yield measured
    if not measured:
        return
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        reporter.write_line("")
        reporter.write_line(
            f"{INPUTS} inputs, variant {kernels.select().name}, GB/s of input, median of {ROUNDS}"
        )
        reporter.write_line(
            f"{'dtype':>9} {'KiB each':>9} {'one pass':>9} {'chain':>7} {'fresh':>7} {'numpy':>7}"
            f" {'read':>7} {'memcpy':>7} {'/ chain':>9} {'/ fresh':>8} {'/ numpy':>8} {'/ read':>7}"
        )
        for row in measured:
            reporter.write_line(
                f"{row.dtype.name:>9} {row.size >> 10:>9} {row.one_pass:>9.1f} {row.chain:>7.1f}"
                f" {row.fresh:>7.1f} {row.numpy:>7.1f} {row.read:>7.1f} {row.memcpy:>7.1f}"
                f" {row.one_pass / row.chain:>8.2f}x {row.one_pass / row.fresh:>7.2f}x"
                f" {row.one_pass / row.numpy:>7.2f}x"
                f" {row.one_pass / row.read:>7.2f}"
            )


def numpy_chain(inputs: list[Array], out: Array, dtype: DType) -> None:
    if dtype is DType.BFLOAT16:
        kernels.select("numpy").reduce(inputs, out, dtype, ReduceOp.SUM)
        return
    np.add(inputs[0], inputs[1], out=out)
    for source in inputs[2:]:
        np.add(out, source, out=out)


def contenders(inputs: list[Array], out: Array, dtype: DType) -> list[Callable[[], None]]:
    """Return what is timed: one pass, both chains, NumPy, both ways to read, memcpy."""
    best = kernels.select()
    partial_sums = [np.ones_like(out) for _ in inputs[1:]]

    def one_pass() -> None:
        best.reduce(inputs, out, dtype, ReduceOp.SUM)

    def chain() -> None:
        best.reduce(inputs[:2], out, dtype, ReduceOp.SUM)
        for source in inputs[2:]:
            best.reduce([out, source], out, dtype, ReduceOp.SUM)

    def fresh() -> None:
        total = inputs[0]
        for source, result in zip(inputs[1:], partial_sums, strict=True):
            best.reduce([total, source], result, dtype, ReduceOp.SUM)
            total = result

    def by_numpy() -> None:
        numpy_chain(inputs, out, dtype)

    def read_streams() -> None:
        best.read_bytes(inputs)  # type: ignore[attr-defined]

    def read_in_turn() -> None:
        for source in inputs:
            best.read_bytes([source])  # type: ignore[attr-defined]

    def memcpy() -> None:
        for source in inputs:
            np.copyto(out, source)

    return [one_pass, chain, fresh, by_numpy, read_streams, read_in_turn, memcpy]


def measure(dtype: DType, size: int) -> Figures:
    """Run the contenders in turn over the same memory, which has been written to before."""
    elements = DTYPES[dtype]
    rng = np.random.default_rng(0)
    values: Array = rng.standard_normal(size // elements.itemsize).astype(np.float32)
    if dtype is DType.BFLOAT16:
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    inputs = [values.astype(elements) for _ in range(INPUTS)]
    timed = contenders(inputs, np.ones_like(inputs[0]), dtype)
    calls = max(1, (8 << 20) // (INPUTS * size))  # so that a timing lasts long enough to be one
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(ROUNDS):
        for contender, record in zip(timed, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                contender()
            record.append((time.perf_counter() - start) / calls)
    speeds = [INPUTS * size / statistics.median(record) / 1e9 for record in times]
    one_pass, chain, fresh, by_numpy, read_streams, read_in_turn, memcpy = speeds
    read = max(read_streams, read_in_turn)
    return Figures(dtype, size, one_pass, chain, fresh, by_numpy, read, memcpy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_one_pass(
    benchmark: BenchmarkFixture, figures: list[Figures], dtype: DType, size: int
) -> None:
    row = benchmark.pedantic(measure, args=(dtype, size), rounds=1)
    figures.append(row)
    benchmark.extra_info.update(
        {name: value for name, value in vars(row).items() if isinstance(value, float)}
    )


def test_bars(benchmark: BenchmarkFixture, figures: list[Figures]) -> None:
    if kernels.select().name == "numpy":
        pytest.skip("the bars are for the compiled kernels")

    def typical_ratios() -> tuple[float, float]:
        large = [row for row in figures if row.dtype is DType.FLOAT32 and row.size >= OUT_OF_CACHE]
        return (
            statistics.median(row.one_pass / row.chain for row in large),
            statistics.median(row.one_pass / row.read for row in large),
        )

    over_chain, over_read = benchmark.pedantic(typical_ratios, rounds=1)
    assert over_chain >= BAR_CHAIN
    assert over_read >= BAR_READ
