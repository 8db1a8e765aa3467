"""Casts between float32 and the narrower types that travel, by every variant that can run here.

`nbytes` are those of the float32 elements. They stay in the L2 cache or come from memory.
"""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness import block8_oracle
from reducer.wire.constants import DType
from worker_client.staging import casts

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

HALVES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
BLOCKS = {DType.BLOCK8: "int8", DType.BLOCK8_E4M3: "fp8_e4m3"}
SENT = [*HALVES, *BLOCKS]

pytestmark = [
    pytest.mark.benchmark(max_time=0.2),
    pytest.mark.parametrize("variant", casts.variants()),
    pytest.mark.parametrize("dtype", SENT, ids=lambda dtype: dtype.name.lower()),
    pytest.mark.parametrize("nbytes", [256 << 10, 64 << 20], ids=["256KiB", "64MiB"]),
]


def describe(benchmark: BenchmarkFixture, what: str, dtype: DType, nbytes: int) -> None:
    size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    benchmark.group = f"casts, {what} {dtype.name.lower()}, {size}"
    benchmark.extra_info["nbytes"] = nbytes


def floats(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(nbytes // 4, np.float32)


def view(array: Array) -> memoryview:
    return array.view(np.uint8).data


def travels(values: Array, dtype: DType) -> Array:
    """Return the bytes that values are rounded to."""
    if dtype.is_block:
        return block8_oracle.travels(values, BLOCKS[dtype]).reshape(-1)
    return values.astype(HALVES[dtype]).view(np.uint8)


def arrives(sent: Array, dtype: DType, count: int) -> Array:
    """Return the values that bytes stand for."""
    if dtype.is_block:
        rows = sent.reshape(-1, block8_oracle.BYTES)
        return block8_oracle.arrives(rows, count, BLOCKS[dtype])
    return sent.view(HALVES[dtype]).astype(np.float32)


def same_bits(found: Array, expected: Array) -> bool:
    return bool((found.view(np.uint8) == expected.view(np.uint8)).all())


def test_narrow(benchmark: BenchmarkFixture, nbytes: int, dtype: DType, variant: str) -> None:
    values = floats(nbytes)
    out = np.ones(dtype.nbytes(values.size), np.uint8)
    describe(benchmark, "float32 to", dtype, nbytes)
    benchmark(casts.select(variant).narrow, view(values), view(out), dtype)
    assert same_bits(out, travels(values, dtype))


def test_narrow_keeping(
    benchmark: BenchmarkFixture, nbytes: int, dtype: DType, variant: str
) -> None:
    """With what rounding took away last time added, and what it takes away now kept."""
    narrow = casts.select(variant).narrow_keeping
    values, residual = floats(nbytes), np.ones(nbytes // 4, np.float32)
    out = np.ones(dtype.nbytes(values.size), np.uint8)
    describe(benchmark, "float32 with the residual to", dtype, nbytes)
    benchmark(narrow, view(values), view(residual), view(out), dtype)
    # Every call changed the residual: what is compared is one more, which begins with a known one.
    total = values + floats(nbytes, seed=1)
    residual[:] = floats(nbytes, seed=1)
    narrow(view(values), view(residual), view(out), dtype)
    rounded = travels(total, dtype)
    assert same_bits(out, rounded)
    assert same_bits(residual, total - arrives(rounded, dtype, total.size))


def test_widen(benchmark: BenchmarkFixture, nbytes: int, dtype: DType, variant: str) -> None:
    sent = travels(floats(nbytes), dtype)
    out = np.ones(nbytes // 4, np.float32)
    describe(benchmark, "to float32 from", dtype, nbytes)
    benchmark(casts.select(variant).widen, view(sent), view(out), dtype)
    assert same_bits(out, arrives(sent, dtype, out.size))
