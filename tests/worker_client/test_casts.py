"""Casts to the wire's types and back: every variant gives the bits of the NumPy twin and of others.

PyTorch's and NumPy's own casts are the independent witnesses; of blocks, `block8_oracle`.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from harness import block8_oracle
from reducer.wire.constants import DType
from worker_client.staging import casts

COMPILED = [name for name in casts.variants() if name != "numpy"]
ALL = list(casts.variants())
TYPES = [DType.BFLOAT16, DType.FLOAT16]
BLOCKS = {DType.BLOCK8: "int8", DType.BLOCK8_E4M3: "fp8_e4m3"}
SENT = [*TYPES, *BLOCKS]
COUNTS = [*range(35), 63, 64, 65, 127, 129, 251, 252, 253, 503, 504, 505, 4099]
LONG = 1 << 19  # floats that are written past the caches
NUMPY = {DType.BFLOAT16: ml_dtypes.bfloat16, DType.FLOAT16: np.float16}


def view(array):
    return array.reshape(-1).view(np.uint8).data


def misaligned(data, offset):
    """The same bytes, `offset` bytes into a 64-byte line."""
    nbytes = data.nbytes
    room = np.empty(nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + nbytes] = data.view(np.uint8)
    return room[start : start + nbytes]


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


def narrow(name, values, dtype):
    out = np.empty(dtype.nbytes(values.size) // 2, np.uint16)
    casts.select(name).narrow(view(values), view(out), dtype)
    return out


def test_the_extension_is_built():
    assert "generic" in COMPILED
    assert casts.select().name == ALL[0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_rounding_is_that_of_others(name, dtype):
    values = floats(1 << 16)
    got = narrow(name, values, dtype)
    nan = np.isnan(values)
    with np.errstate(all="ignore"):
        assert (got == values.astype(NUMPY[dtype]).view(np.uint16))[~nan].all()
    torch_type = getattr(torch, dtype.name.lower())
    theirs = torch.from_numpy(values).to(torch_type).view(torch.int16).numpy().view(np.uint16)
    assert (got == theirs)[~nan].all()
    assert set(got[nan]) == {0x7FC0 if dtype is DType.BFLOAT16 else 0x7E00}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_every_16_bit_value_comes_back_exactly(name, dtype):
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(halves.size, np.float32)
    casts.select(name).widen(view(halves), view(out), dtype)
    expected = halves.view(NUMPY[dtype]).astype(np.float32)
    nan = np.isnan(expected)
    assert (out.view(np.uint32) == expected.view(np.uint32))[~nan].all()
    assert set(out.view(np.uint32)[nan]) == {0x7FC00000}
    assert (narrow(name, out, dtype) == halves)[~nan].all()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", SENT)
@pytest.mark.parametrize("name", COMPILED)
def test_same_bits_as_numpy_at_any_length_and_alignment(name, dtype, offset):
    compiled, plain = casts.select(name), casts.select("numpy")
    for count in COUNTS:
        values, kept = floats(count, seed=count), floats(count, seed=count + 1)
        sent = np.resize(values.view(np.uint8), dtype.nbytes(count))
        results = []
        for which in (compiled, plain):
            given, rest = misaligned(values, offset), misaligned(kept, offset)
            out = misaligned(np.full(dtype.nbytes(count), 0xA5, np.uint8), offset)
            whole = misaligned(np.full(count, 0.5, np.float32), offset)
            which.narrow(given.data, out.data, dtype)
            ends = [out.tobytes()]
            which.narrow_keeping(given.data, rest.data, out.data, dtype)
            ends += [out.tobytes(), rest.tobytes()]
            which.widen(misaligned(sent, offset).data, whole.data, dtype)
            ends.append(whole.tobytes())
            which.divide(given.data, 3.0, DType.FLOAT32)
            ends.append(given.tobytes())
            double = misaligned(values[: count // 2 * 2].view(np.float64), offset)
            which.divide(double.data, -7.0, DType.FLOAT64)
            results.append([*ends, double.tobytes()])
        assert results[0] == results[1], count


@pytest.mark.parametrize("offset", [4, 16])
@pytest.mark.parametrize("dtype", SENT)
@pytest.mark.parametrize("name", COMPILED)
def test_a_long_result_has_the_bits_of_its_parts(name, dtype, offset):
    chosen, count, short = casts.select(name), LONG + 1000, 252 * 100
    sent = np.resize(usual(short).view(np.uint8), dtype.nbytes(count))
    whole, parts = (misaligned(np.full(count + 40, 0.5, np.float32), offset) for _ in range(2))
    chosen.widen(sent.data, whole[: 4 * count].data, dtype)
    for at in range(0, count, short):
        few = min(short, count - at)
        begin = dtype.nbytes(at)
        part = sent[begin : begin + dtype.nbytes(few)]
        chosen.widen(part.data, parts[4 * at :][: 4 * few].data, dtype)
    assert whole.tobytes() == parts.tobytes()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.BLOCK8, DType.BLOCK8_E4M3])
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_written_beyond_the_end(name, dtype):
    chosen = casts.select(name)
    for count in COUNTS:
        nbytes = dtype.nbytes(count)
        out = np.full(nbytes + 80, 0xA5, np.uint8)
        whole, kept = (np.full(count + 40, 0.5, np.float32) for _ in range(2))
        chosen.narrow(view(floats(count)), out[:nbytes].data, dtype)
        chosen.narrow_keeping(view(floats(count)), view(kept[:count]), out[:nbytes].data, dtype)
        chosen.widen(out[:nbytes].data, view(whole[:count]), dtype)
        chosen.divide(view(whole[:count]), 2.0, DType.FLOAT32)
        assert (out[nbytes:] == 0xA5).all()
        assert (whole[count:] == 0.5).all()
        assert (kept[count:] == 0.5).all()


@pytest.mark.parametrize("dtype", BLOCKS)
@pytest.mark.parametrize("name", ALL)
def test_blocks_are_those_of_the_specification(name, dtype):
    chosen, wire = casts.select(name), BLOCKS[dtype]
    for count in COUNTS:
        # Blocks whose largest value is beside 2^-100, too, below which all is zero.
        tiny = np.resize(np.float32([0.99, -0.9, 0.5] * 84 + [1, -0.9, 0.5] * 84), count)
        for values in (floats(count, seed=count), usual(count), tiny * np.float32(2.0**-100)):
            sent = np.empty(dtype.nbytes(count), np.uint8)
            chosen.narrow(view(values), sent.data, dtype)
            expected = block8_oracle.travels(values, wire)
            assert sent.tobytes() == expected.tobytes(), count
            back = np.empty(count, np.float32)
            chosen.widen(sent.data, view(back), dtype)
            assert back.tobytes() == block8_oracle.arrives(expected, count, wire).tobytes()
            residual = usual(count, seed=1)
            with np.errstate(all="ignore"):
                total = values + residual
                expected = block8_oracle.travels(total, wire)
                rest = total - block8_oracle.arrives(expected, count, wire)
            rest[~np.isfinite(rest)] = 0
            chosen.narrow_keeping(view(values), view(residual), sent.data, dtype)
            assert sent.tobytes() == expected.tobytes(), count
            assert residual.tobytes() == rest.tobytes(), count


@pytest.mark.parametrize("name", ALL)
def test_a_block_loses_half_a_step_at_most(name):
    values = usual(252 * 50) * np.repeat(
        np.float32(10) ** np.arange(-25, 25, dtype=np.float32), 252
    )
    sent, back = np.empty(256 * 50, np.uint8), np.empty(values.size, np.float32)
    casts.select(name).narrow(view(values), sent.data, DType.BLOCK8)
    casts.select(name).widen(sent.data, view(back), DType.BLOCK8)
    largest = np.abs(values).reshape(50, 252).max(axis=1, keepdims=True)
    lost = np.abs(back.astype(np.float64) - values).reshape(50, 252)
    assert (lost <= largest / 254 * 1.00001).all()


@pytest.mark.parametrize("name", ALL)
def test_a_number_of_e4m3_loses_a_sixteenth_at_most(name):
    rng = np.random.default_rng(5)
    values = usual(252 * 50) * np.float32(10) ** rng.uniform(-7, 0, 252 * 50).astype(np.float32)
    sent, back = np.empty(256 * 50, np.uint8), np.empty(values.size, np.float32)
    casts.select(name).narrow(view(values), sent.data, DType.BLOCK8_E4M3)
    casts.select(name).widen(sent.data, view(back), DType.BLOCK8_E4M3)
    largest = np.abs(values).reshape(50, 252).max(axis=1).repeat(252)
    lost = np.abs(back.astype(np.float64) - values)
    assert (lost <= np.maximum(np.abs(values) / 16, largest / 448 / 1024) * 1.00001).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_what_rounding_takes_away_is_kept(name, dtype):
    rng = np.random.default_rng(3)
    values = rng.standard_normal(1000).astype(np.float32)
    residual = np.zeros(1000, np.float32)
    out, total = np.empty(1000, np.uint16), np.zeros(1000)
    for _ in range(64):
        casts.select(name).narrow_keeping(view(values), view(residual), view(out), dtype)
        total += out.view(NUMPY[dtype]).astype(np.float64)
    # All that was ever rounded away is in the residual, which is less than one rounding.
    assert np.abs(total + residual - 64 * values.astype(np.float64)).max() < 1e-4
    assert (np.abs(residual) <= np.abs(values) * 2.0**-7).all()


@pytest.mark.parametrize("name", ALL)
def test_an_overflow_leaves_no_residual(name):
    values = np.array([1e6, -1e6, np.inf, np.nan], np.float32)
    residual = np.ones(4, np.float32)
    out = np.empty(4, np.uint16)
    casts.select(name).narrow_keeping(view(values), view(residual), view(out), DType.FLOAT16)
    assert out.tolist() == [0x7C00, 0xFC00, 0x7C00, 0x7E00]
    assert residual.tolist() == [0.0] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="flushing is set per thread here")
@pytest.mark.parametrize("name", COMPILED)
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(name):
    values = floats(4096)
    before = [narrow(name, values, dtype).tobytes() for dtype in SENT]
    divided = np.full(100, 2e-38, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        assert [narrow(name, values, dtype).tobytes() for dtype in SENT] == before
        casts.select(name).divide(view(divided), 1000.0, DType.FLOAT32)
    finally:
        torch.set_flush_denormal(False)
    assert (divided == np.float32(2e-38) / np.float32(1000)).all()
    assert divided[0] != 0
