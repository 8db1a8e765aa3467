"""Blocks of 252 values with one scale: every variant gives the bits that the specification says.

Of int8 and of E4M3, whose independent witness is `ml_dtypes`.
"""

import numpy as np
import pytest

from harness import block8_oracle as oracle
from reducer import kernels
from reducer.wire.constants import DType, ReduceOp

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


def contributions(n, count, wire, seed=0):
    """Rows of blocks for n ranks: mostly usual ones, and each special case beside those."""
    rng = np.random.default_rng([seed, n, count])
    rows = np.empty((n, count, oracle.BYTES), np.uint8)
    for at in range(count):
        for rank in range(n):
            special = rng.random() < 0.3
            case = CASES[rng.integers(len(CASES))] if special else "usual"
            rows[rank, at] = block(case, rng, wire)
    return list(rows)


def misaligned(data, offset):
    """The same bytes, `offset` bytes into a 64-byte line."""
    room = np.empty(data.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + data.nbytes] = data.reshape(-1)
    return room[start : start + data.nbytes]


def fold(variant, inputs, op, wire="int8", offset=0):
    """Fold, and see that nothing is written beside the output."""
    sources = [misaligned(data, offset * rank % 7) for rank, data in enumerate(inputs)]
    room = np.full(inputs[0].nbytes + 128 + offset, 0xA5, np.uint8)
    out = room[64 + offset : 64 + offset + inputs[0].nbytes]
    variant.reduce(sources, out, DTYPES[wire], op)
    assert (room[: 64 + offset] == 0xA5).all()
    assert (room[64 + offset + out.size :] == 0xA5).all()
    return out.reshape(-1, oracle.BYTES)


@WIRES
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_the_bits_are_those_of_the_specification(variant, op, wire):
    for n in (*range(1, 10), 17):
        for count in range(6):
            inputs = contributions(n, count, wire)
            expected = oracle.folded(inputs, wire, mean=op is ReduceOp.MEAN)
            for offset in (0, 1, 3):
                got = fold(variant, inputs, op, wire, offset)
                assert got.tobytes() == expected.tobytes(), f"{n=} {count=} {offset=}"


@pytest.mark.parametrize(
    "wire", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.extended("test_the_bits"))]
)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("case", CASES)
def test_each_special_case_at_every_rank_and_at_one(variant, case, op, wire):
    rng = np.random.default_rng(len(case))
    for n in (1, 2, 5):
        for ranks in ({0}, {n - 1}, set(range(n))):
            inputs = [
                np.stack([block(case if rank in ranks else "usual", rng, wire) for _ in range(9)])
                for rank in range(n)
            ]
            expected = oracle.folded(inputs, wire, mean=op is ReduceOp.MEAN)
            assert fold(variant, inputs, op, wire).tobytes() == expected.tobytes()


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


@WIRES
def test_what_is_a_step_stays_what_it_is(variant, wire):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(oracle.VALUES * 500) * 2.0 ** rng.integers(-20, 1, 126_000)
    sent = oracle.travels(values.astype(np.float32), wire)
    for op, n in ((ReduceOp.SUM, 1), (ReduceOp.MEAN, 3)):
        assert fold(variant, [sent] * n, op, wire)[:, 4:].tobytes() == sent[:, 4:].tobytes()


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


@pytest.mark.parametrize(
    ("wire", "codes"), [("int8", (0, 1)), ("fp8_e4m3", (0x38, 0x39)), ("fp8_e4m3", (0, 1))]
)
def test_means_lose_nothing_on_average(variant, wire, codes):
    # What one of 8 ranks says more than the others is an eighth of a step in the mean, which to
    # nearest it would lose; of E4M3 that is of 1, which has 8 steps to 2, and the smallest number.
    blocks, ranks = 2000, 8
    scales = np.random.default_rng(0).uniform(0.5, 2, blocks).astype(np.float32)
    inputs = np.zeros((ranks, blocks, oracle.BYTES), np.uint8)
    inputs[:, :, :4] = scales.view(np.uint8).reshape(-1, 4)
    inputs[:, :, 4] = 127 if wire == "int8" else 0x7E
    inputs[:, :, 5:] = codes[0]
    inputs[0, :, 5:] = codes[1]
    results = fold(variant, list(inputs), ReduceOp.MEAN, wire)[:, 5:]
    assert set(np.unique(results)) == set(codes)
    more = results == codes[1]
    assert more.mean() == pytest.approx(1 / ranks, rel=0.02)  # seven standard deviations
    of_places = more.mean(axis=0)
    assert of_places.std() < 1.3 * np.sqrt(1 / ranks * (1 - 1 / ranks) / blocks)
