"""Blocks of 252 values with one scale: every variant gives the bits that the specification says.

Of int8 and of E4M3, whose independent witness is `ml_dtypes`.
"""

import numpy as np
import pytest

from harness import block8_oracle as oracle
from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
from tests.kernels import golden

CASES = (
    "usual", "wide range", "outlier", "zeros", "subnormal", "tiny", "at 2^-100", "huge", "overflow",
    "nan", "inf", "ties", "any scale",
)  # fmt: skip
# As bits: what no worker sends.
SCALES = (
    0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x80000000, 0xBF800000, 0x00000001, 0x7F7FFFFF,
)  # fmt: skip


DTYPES = {"int8": DType.BLOCK8, "fp8_e4m3": DType.BLOCK8_E4M3}
WIRES = pytest.mark.parametrize("wire", DTYPES)


@pytest.fixture(params=kernels.variants())
def variant(request):
    return kernels.select(request.param)


def block(case, rng, wire):
    """Return the bytes of one block."""
    x = rng.standard_normal(oracle.VALUES).astype(np.float32)
    at = rng.integers(oracle.VALUES)
    match case:
        case "wide range":
            x *= np.float32(2) ** rng.integers(-30, 30, x.size).astype(np.float32)
        case "outlier":
            x[at] = 1e6
        case "zeros":
            x[:] = rng.choice([0.0, -0.0], x.size)
        case "subnormal":
            x *= np.float32(1e-39)
        case "tiny":
            x *= np.float32(2.0**-104)
        case "at 2^-100":
            x[:] = np.float32(2.0**-100)
            x[at] = np.nextafter(np.float32(2.0**-100), np.float32(rng.choice([0, 1])))
        case "huge" | "overflow":
            x[:] = np.finfo(np.float32).max * np.float32(0.3 if case == "huge" else 1)
        case "nan":
            x[at] = np.nan
        case "inf":
            x[at] = rng.choice([np.inf, -np.inf])
        case "ties":
            x = ties(rng, wire)
    sent = oracle.travels(x, wire)[0]
    if case == "any scale":
        sent[:4] = np.array([rng.choice(SCALES)], "<u4").view(np.uint8)
        sent[4:] = rng.integers(0, 256, oracle.VALUES, np.uint8)
    return sent


def ties(rng, wire):
    """Return values of which many lie in the middle between two q."""
    x = rng.integers(-254, 255, oracle.VALUES).astype(np.float32) / np.float32(2)
    if wire == "fp8_e4m3":
        x *= np.float32(2) ** rng.integers(-16, 1, x.size).astype(np.float32)
    x[0] = oracle.LARGEST[wire]
    return x


def contributions(n, count, wire):
    """Rows of blocks for n ranks: mostly usual ones, and each special case at some or at all."""
    rng = np.random.default_rng([n, count])
    rows = np.empty((n, count, oracle.BYTES), np.uint8)
    for at in range(count):
        case, share = CASES[rng.integers(len(CASES))], rng.choice([0.3, 1.0])
        for rank in range(n):
            rows[rank, at] = block(case if rng.random() < share else "usual", rng, wire)
    return list(rows)


def fold(variant, inputs, op, wire="int8", offset=0):
    *_, out = golden.called(
        lambda *its: variant.reduce(its[:-1], its[-1], DTYPES[wire], op),
        offset,
        *(data.tobytes() for data in inputs),
        bytes(inputs[0].nbytes),
    )
    return np.frombuffer(out, np.uint8).reshape(-1, oracle.BYTES)


@WIRES
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_the_bits_are_those_of_the_specification(variant, op, wire):
    for n in (*range(1, 10), 17):
        for count in (*range(4), 12):
            inputs = contributions(n, count, wire)
            expected = oracle.folded(inputs, wire, mean=op is ReduceOp.MEAN)
            for offset in (0, 1, 3):
                got = fold(variant, inputs, op, wire, offset)
                assert got.tobytes() == expected.tobytes(), f"{n=} {count=} {offset=}"


def test_a_long_buffer_is_folded_in_steps_that_do_not_show(variant):
    inputs = [np.tile(rows, (100, 1)) for rows in contributions(3, 7, "int8")]
    expected = np.tile(oracle.folded(contributions(3, 7, "int8")), (100, 1))
    assert fold(variant, inputs, ReduceOp.SUM).tobytes() == expected.tobytes()


def sent(scale, *q):
    """One block; its q are int8, or bytes of E4M3."""
    data = np.zeros(oracle.BYTES, np.uint8)
    data[:4] = np.array([scale], "<f4").view(np.uint8)
    data[4 : 4 + len(q)] = np.array(q, np.int16).astype(np.uint8)
    return data


def test_by_hand(variant):
    # 127 + 127 = 254, whose scale is 2: -63 and 63 are 31.5 steps. What is added to them is -0.443,
    # mixed of 0xc27c0000 and byte 5, and -0.260, of 0x427c0000 and byte 6; to the mean -0.416 and
    # 0.077, of other bits.
    one, other = sent(1.0, 127, -64, 64, 3), sent(1.0, 127, 1, -1, -3)
    out = fold(variant, [one, other], ReduceOp.SUM)[0]
    assert out.tobytes() == sent(2.0, 127, -32, 31).tobytes()
    assert fold(variant, [one, other], ReduceOp.MEAN)[0].tobytes() == (
        sent(1.0, 127, -32, 32).tobytes()
    )
    # The mean of 1.5 * 2^-100 and 0 is less than 2^-100, and that of 2^-99 and 0 is as much.
    for scale, kept in ((1.5 * 2.0**-100 / 127, 0), (2.0**-99, 127)):
        out = fold(variant, [sent(scale, 127), sent(0.0)], ReduceOp.MEAN)[0]
        assert out[4] == kept
    # One that is not finite spoils the whole block, and no other.
    blocks = np.stack([sent(np.inf, 0, 1), sent(1.0, 127, 5)])
    out = fold(variant, [blocks, blocks], ReduceOp.SUM)
    assert out[0].tobytes() == bytes.fromhex("0000c07f") + bytes(252)
    assert out[1].tobytes() == sent(2.0, 127, 5).tobytes()


def test_every_byte_of_e4m3_is_the_number_that_it_stands_for(variant):
    every = [byte for byte in range(256) if byte & 127 != 127]  # 254 numbers
    for some in (every[:252], every[-252:]):
        whole = sent(1, *some)
        assert (fold(variant, [whole], ReduceOp.SUM, "fp8_e4m3") == whole).all()
    for nan in (0x7F, 0xFF):
        spoilt = whole.copy()
        spoilt[200] = nan
        out = fold(variant, [whole, spoilt], ReduceOp.SUM, "fp8_e4m3")
        assert out.tobytes() == bytes.fromhex("0000c07f") + bytes(252)


def test_e4m3_by_hand(variant):
    # 448 + 448 = 896, whose scale is 2: 16 + 1 becomes 8.5, half a step above 8, and 2^-9 half a
    # step. What is added decides, by the bits of 17 and byte 5, and of 2^-9 and bytes 6 and 7.
    one, other = sent(1, 0x7E, 0x58, 1, 0x81), sent(1, 0x7E, 0x38)
    out = fold(variant, [one, other], ReduceOp.SUM, "fp8_e4m3")[0]
    assert out[:5].tobytes() == np.array([2], "<f4").tobytes() + b"\x7e"
    ups = [
        mixed(bits, place) >= 2048
        for bits, place in ((0x41880000, 5), (0x3B000000, 6), (0xBB000000, 7))
    ]
    assert out[5:8].tolist() == [0x50 + ups[0], ups[1], 0x80 + ups[2]]


def mixed(bits, place):
    """Return h of the specification."""
    h = (bits ^ place * 2654435761) * 2246822507 % 2**32
    return (h ^ h >> 15) * 3266489909 % 2**32 >> 20
