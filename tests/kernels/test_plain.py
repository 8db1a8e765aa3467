"""The NumPy twin against values worked out by hand."""

import numpy as np
import pytest

from reducer.kernels.plain import PlainKernels
from reducer.wire.constants import DType, ReduceOp

BITS = {dtype: np.dtype(f"<u{dtype.itemsize}") for dtype in DType if dtype.itemsize <= 8}
QUIET_NAN = {
    DType.FLOAT32: 0x7FC00000,
    DType.FLOAT64: 0x7FF8000000000000,
    DType.FLOAT16: 0x7E00,
    DType.BFLOAT16: 0x7FC0,
}


def fold(dtype, op, *columns):
    """Fold one element of each rank, given and returned as bits."""
    inputs = [np.array([bits], BITS[dtype]).tobytes() for bits in columns]
    out = bytearray(dtype.itemsize)
    PlainKernels().reduce(inputs, out, dtype, op)
    return int(np.frombuffer(out, BITS[dtype])[0])


@pytest.mark.parametrize(
    ("dtype", "op", "columns", "expected"),
    [
        # 2^24 + 1 + 1: in this order both ones are lost; 1 + 1 + 2^24 keeps them.
        (DType.FLOAT32, ReduceOp.SUM, [0x4B800000, 0x3F800000, 0x3F800000], 0x4B800000),
        (DType.FLOAT32, ReduceOp.SUM, [0x3F800000, 0x3F800000, 0x4B800000], 0x4B800001),
        # (1 + 2^-24) is a tie and goes to the even 1; (1 + 2^-23) + 2^-24 to the even 1 + 2^-22.
        (DType.FLOAT32, ReduceOp.SUM, [0x3F800000, 0x33800000], 0x3F800000),
        (DType.FLOAT32, ReduceOp.SUM, [0x3F800001, 0x33800000], 0x3F800002),
        # The smallest subnormal, twice; the largest number, twice.
        (DType.FLOAT32, ReduceOp.SUM, [0x00000001, 0x00000001], 0x00000002),
        (DType.FLOAT32, ReduceOp.SUM, [0x7F7FFFFF, 0x7F7FFFFF], 0x7F800000),
        # 5 divided by 3; times a rounded third it would be 0x3fd55556.
        (DType.FLOAT32, ReduceOp.MEAN, [0x40A00000, 0, 0], 0x3FD55555),
        # 2/3 is 0.101010...b: rounded up.
        (DType.FLOAT32, ReduceOp.MEAN, [0x3F800000, 0x3F800000, 0], 0x3F2AAAAB),
        # The smallest subnormal halved is a tie: to the even zero.
        (DType.FLOAT32, ReduceOp.MEAN, [0x00000001, 0x00000000], 0x00000000),
        # -0 + -0 = -0; -0 alone stays.
        (DType.FLOAT32, ReduceOp.SUM, [0x80000000, 0x80000000], 0x80000000),
        (DType.FLOAT32, ReduceOp.SUM, [0x80000000], 0x80000000),
        (DType.FLOAT64, ReduceOp.SUM, [0x4340000000000000, 0x3FF0000000000000], 0x4340000000000000),
        # 2048 + 1 + 1 in halves: each addition alone would round back to 2048.
        (DType.FLOAT16, ReduceOp.SUM, [0x6800, 0x3C00, 0x3C00], 0x6801),
        # 2048 + 1 is a tie: to the even 2048. 2050 + 1 to the even 2052.
        (DType.FLOAT16, ReduceOp.SUM, [0x6800, 0x3C00], 0x6800),
        (DType.FLOAT16, ReduceOp.SUM, [0x6801, 0x3C00], 0x6802),
        # 65504 + 16 is the tie at which a half overflows; 65504 + 8 does not.
        (DType.FLOAT16, ReduceOp.SUM, [0x7BFF, 0x4C00], 0x7C00),
        (DType.FLOAT16, ReduceOp.SUM, [0x7BFF, 0x4800], 0x7BFF),
        # 65504 + 65504 - 65504 passes through what a half cannot hold.
        (DType.FLOAT16, ReduceOp.SUM, [0x7BFF, 0x7BFF, 0xFBFF], 0x7BFF),
        # Half of an odd subnormal is a tie: 1 -> 0, 3 -> 2.
        (DType.FLOAT16, ReduceOp.MEAN, [0x0001, 0x0000], 0x0000),
        (DType.FLOAT16, ReduceOp.MEAN, [0x0003, 0x0000], 0x0002),
        # 256 + 1 + 1 in bfloat16: kept by the wide accumulator; 256 + 1 is a tie to the even.
        (DType.BFLOAT16, ReduceOp.SUM, [0x4380, 0x3F80, 0x3F80], 0x4381),
        (DType.BFLOAT16, ReduceOp.SUM, [0x4380, 0x3F80], 0x4380),
        (DType.BFLOAT16, ReduceOp.SUM, [0x4381, 0x3F80], 0x4382),
        # The largest bfloat16 plus half of its last place is a tie at the edge: to infinity.
        (DType.BFLOAT16, ReduceOp.SUM, [0x7F7F, 0x7B00], 0x7F80),
        # (256 + 5 + 0) / 3 = 87; a sum rounded before the division would make it 260 / 3, 86.5.
        (DType.BFLOAT16, ReduceOp.MEAN, [0x4380, 0x40A0, 0x0000], 0x42AE),
        (DType.INT8, ReduceOp.SUM, [0x7F, 0x01], 0x80),
        (DType.INT8, ReduceOp.MIN, [0x7F, 0x80, 0x00], 0x80),
        (DType.UINT8, ReduceOp.MIN, [0x7F, 0x80, 0x00], 0x00),
        (DType.INT32, ReduceOp.SUM, [0x7FFFFFFF, 0x00000001], 0x80000000),
        (DType.INT32, ReduceOp.PRODUCT, [0x80000000, 0xFFFFFFFF], 0x80000000),
        (DType.INT64, ReduceOp.SUM, [0x7FFFFFFFFFFFFFFF, 1], 0x8000000000000000),
        (DType.INT64, ReduceOp.MAX, [0x8000000000000000, 0xFFFFFFFFFFFFFFFF], 0xFFFFFFFFFFFFFFFF),
    ],
)
def test_by_hand(dtype, op, columns, expected):
    assert f"{fold(dtype, op, *columns):#x}" == f"{expected:#x}"


@pytest.mark.parametrize("dtype", QUIET_NAN)
def test_nan_is_canonical_and_the_earlier_zero_stays(dtype):
    quiet = QUIET_NAN[dtype]
    infinity = quiet & ~(quiet & -quiet)  # the quiet bit is its lowest
    sign = 1 << (8 * dtype.itemsize - 1)
    signaling = infinity + 1
    one = 1  # the smallest subnormal
    for nan in (quiet, quiet | sign, signaling, signaling | sign, sign - 1, 2 * sign - 1):
        for op in ReduceOp:
            assert fold(dtype, op, nan) == quiet
            assert fold(dtype, op, nan, one) == quiet
            assert fold(dtype, op, one, nan) == quiet
            assert fold(dtype, op, one, nan, one, infinity) == quiet
    assert fold(dtype, ReduceOp.SUM, infinity, infinity | sign) == quiet
    assert fold(dtype, ReduceOp.PRODUCT, infinity, 0) == quiet
    assert fold(dtype, ReduceOp.SUM, infinity, infinity) == infinity
    assert fold(dtype, ReduceOp.MEAN, infinity, infinity) == infinity
    for op in (ReduceOp.MIN, ReduceOp.MAX):  # of two zeros the earlier one stays
        assert (fold(dtype, op, 0, sign), fold(dtype, op, sign, 0)) == (0, sign)


def test_blocks_do_not_show():
    count = (1 << 15) + 3
    a, b = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)[::-1].copy()
    out = np.empty_like(a)
    PlainKernels().reduce([a, b], out, DType.INT32, ReduceOp.SUM)
    assert (out == count - 1).all()
