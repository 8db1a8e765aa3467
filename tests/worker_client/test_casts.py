"""Casts to the wire's types and back: every variant gives the bits of an oracle of the tests' own.

`tests/kernels/golden.py` has it, by NumPy's own casts and, of blocks, by the specification.
"""

import functools
import sys

import numpy as np
import pytest
import torch

from reducer.wire.constants import DType
from tests.kernels import golden
from worker_client.staging import casts

COMPILED = [name for name in casts.variants() if name != "numpy"]
ALL = list(casts.variants())
SENT = [DType.BFLOAT16, DType.FLOAT16, DType.BLOCK8, DType.BLOCK8_E4M3]
COUNTS = [*range(35), 63, 64, 65, 127, 129, 251, 252, 253, 503, 504, 505, 4099]
LONG = (1 << 19) + 1000  # floats that are written past the caches


@functools.cache
def expected(kind, dtype, *inputs, count=0, by=0.0):
    return golden.result(golden.Request(kind, dtype.name, "", inputs, 4 * count, by))


def floats(count, seed=0):
    """Any bits, values of usual size, ties, and what is special or at the ends of ranges."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, count, np.uint32, endpoint=False)
    usual = rng.standard_normal(count).astype(np.float32).view(np.uint32)
    ties = (usual & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    half_ties = (usual & np.uint32(0xFFFFE000)) | np.uint32(0x1000)
    ends = np.array(
        [0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000,
         0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFFA00000, 0x477FEFFF, 0x477FF000,
         0x477FE000, 0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x38800000, 0x00008000],
        np.uint32,
    )  # fmt: skip
    special = rng.choice(ends, count)
    return np.choose(rng.integers(0, 5, count), [bits, usual, ties, half_ties, special]).view(
        np.float32
    )


def usual(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_the_extension_is_built():
    assert "generic" in COMPILED
    assert casts.select().name == ALL[0]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", SENT)
@pytest.mark.parametrize("name", ALL)
def test_the_oracles_bits_at_any_length_and_alignment(name, dtype, offset):
    for count in COUNTS:
        # Blocks whose largest value is beside 2^-100, too, below which all is zero.
        tiny = np.resize(np.float32([0.99, -0.9, 0.5] * 84 + [1, -0.9, 0.5] * 84), count)
        check(name, dtype, offset, floats(count, seed=count), floats(count, seed=count + 1))
        for values in (usual(count), tiny * np.float32(2.0**-100)):
            check(name, dtype, offset, values, usual(count, seed=1))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("name", ALL)
def test_many_values_and_every_16_bit_one(name, dtype):
    check(name, dtype, 0, floats(1 << 16), np.zeros(1 << 16, np.float32))
    check_widened(name, dtype, 0, np.arange(1 << 16, dtype=np.uint16).tobytes(), 1 << 16)


@pytest.mark.parametrize("dtype", [DType.BLOCK8, DType.BLOCK8_E4M3])
@pytest.mark.parametrize("name", ALL)
def test_a_scale_of_negative_zero_has_its_sign(name, dtype):
    check_widened(name, dtype, 0, b"\0\0\0\x80" + bytes([0, 1, 0x80, 0x81]) * 63, 252)


@pytest.mark.parametrize("offset", [4, 16])
@pytest.mark.parametrize("dtype", SENT)
@pytest.mark.parametrize("name", COMPILED)
def test_a_long_result(name, dtype, offset):
    sent = np.resize(usual(252 * 100).view(np.uint8), dtype.nbytes(LONG)).tobytes()
    check_widened(name, dtype, offset, sent, LONG)


def check(name, dtype, offset, values, residual):
    """Check all casts of values, and that nothing is written beside what they give."""
    chosen, count, given = casts.select(name), values.size, values.tobytes()
    room = bytes(dtype.nbytes(count))
    _, sent = golden.called(lambda *its: chosen.narrow(*its, dtype), offset, given, room)
    assert sent == expected("narrow", dtype, given), count
    check_widened(name, dtype, offset, sent, count)
    check_widened(name, dtype, offset, np.resize(values.view(np.uint8), len(room)).tobytes(), count)
    both = given, residual.tobytes()
    _, kept, sent = golden.called(
        lambda *its: chosen.narrow_keeping(*its, dtype), offset, *both, room
    )
    assert sent + kept == expected("keep", dtype, *both), count
    for kind, by in ((DType.FLOAT32, 3.0), (DType.FLOAT64, -7.0)):
        numbers = given[: len(given) // 8 * 8]
        divided = golden.called(
            lambda its, by=by, kind=kind: chosen.divide(its, by, kind), offset, numbers
        )
        assert divided == (expected("divide", kind, numbers, by=by),), count


def check_widened(name, dtype, offset, sent, count):
    chosen = casts.select(name)
    _, whole = golden.called(lambda *its: chosen.widen(*its, dtype), offset, sent, bytes(4 * count))
    assert whole == expected("widen", dtype, sent, count=count), count


@pytest.mark.skipif(sys.platform != "linux", reason="flushing is set per thread here")
@pytest.mark.parametrize("name", COMPILED)
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(name):
    values, small = floats(4096).tobytes(), np.full(100, 2e-38, np.float32)
    chosen, sent = casts.select(name), {dtype: bytearray(dtype.nbytes(4096)) for dtype in SENT}
    divided = memoryview(bytearray(small.tobytes()))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        for dtype, out in sent.items():
            chosen.narrow(memoryview(values), memoryview(out), dtype)
        chosen.divide(divided, 1000.0, DType.FLOAT32)
    finally:
        torch.set_flush_denormal(False)
    assert sent == {dtype: expected("narrow", dtype, values) for dtype in SENT}
    assert divided == (small / np.float32(1000)).tobytes()
