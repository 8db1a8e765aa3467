"""Every variant gives the bits of the oracle in `golden`; `test_block8` has blocks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
from tests.kernels import golden

COMPILED = tuple(name for name in kernels.variants() if name != "numpy")
INPUT_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
WIDEST_VECTOR = 64  # bytes
BLOCK = 8 * WIDEST_VECTOR  # bytes of each input that the widest kernels fold at a time
LARGE = 4099

# Partners of every 16-bit pattern: values that arithmetic treats specially, and half last places.
SPECIAL = {
    DType.FLOAT16: [
        0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00,
        0xFC00, 0x7E00, 0xFE12, 0x7C01, 0xFDFF, 0x1000, 0x4C00,
    ],
    DType.BFLOAT16: [
        0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80,
        0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFBF, 0x3B80, 0x3C00,
    ],
}  # fmt: skip
BLOCKS = (DType.BLOCK8, DType.BLOCK8_E4M3)
PAIRS = [
    pytest.param(dtype, op, id=f"{dtype.name}-{op.name}")
    for dtype in DType
    for op in ReduceOp
    if dtype.defines(op)
]
WITHOUT_BLOCKS = [pair for pair in PAIRS if pair.values[0] not in BLOCKS]


def contributions(dtype, n, count=LARGE):
    """What n ranks contribute, by `golden`; fewer elements of blocks, which are long."""
    count = count // 500 if dtype in BLOCKS else count
    return [golden.contribution(dtype.name, count, rank) for rank in range(n)]


def counts(dtype):
    lane = WIDEST_VECTOR // dtype.itemsize
    block = BLOCK // dtype.itemsize
    around_blocks = [k * block + rest for k in (1, 2) for rest in (-1, 0, 1)]
    return [*range(2 * lane + 2), *around_blocks, LARGE]


def misaligned(data, offset):
    """A read-only view of a copy that starts `offset` bytes into a 64-byte line."""
    room = np.empty(len(data) + 2 * 64, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room.data[start : start + len(data)].toreadonly()


def fold(name, inputs, dtype, op, out=None):
    out = bytearray(len(inputs[0])) if out is None else out
    kernels.select(name).reduce(inputs, out, dtype, op)
    return bytes(out)


def expected(inputs, dtype, op):
    request = golden.Request("fold", dtype.name, op.name, tuple(inputs), len(inputs[0]))
    return golden.result(request)


def test_the_extension_is_built():
    assert "generic" in COMPILED


@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize(("dtype", "op"), WITHOUT_BLOCKS)
def test_the_oracles_bits_at_any_length_and_alignment(variant, dtype, op):
    canary = b"\xa5" * WIDEST_VECTOR
    for n in INPUT_COUNTS:
        inputs = contributions(dtype, n)
        total = expected(inputs, dtype, op)
        for offset in (0, 1, 3):
            views = [
                misaligned(data, offset if rank % 2 else 0) for rank, data in enumerate(inputs)
            ]
            for count in counts(dtype):
                nbytes = count * dtype.itemsize
                room = bytearray(offset) + canary + bytes(nbytes) + canary
                out = memoryview(room)[offset + len(canary) :][:nbytes]
                fold(variant, [view[:nbytes] for view in views], dtype, op, out)
                whole = bytes(offset) + canary + total[:nbytes] + canary
                assert room == whole, f"{n=} {count=} {offset=}"


@pytest.mark.parametrize("variant", kernels.variants())
@pytest.mark.parametrize("dtype", SPECIAL)
def test_every_16_bit_pattern(variant, dtype):
    every = np.arange(1 << 16, dtype="<u2").tobytes()
    pairs = [[every, np.full(1 << 16, partner, "<u2").tobytes()] for partner in SPECIAL[dtype]]
    for op in ReduceOp:
        for inputs in ([every], *pairs):
            assert fold(variant, inputs, dtype, op) == expected(inputs, dtype, op)


@pytest.mark.parametrize("variant", COMPILED)
def test_many_inputs(variant):
    of = DType.BFLOAT16, ReduceOp.MEAN
    inputs = contributions(DType.BFLOAT16, 1025, 65)
    assert fold(variant, inputs, *of) == expected(inputs, *of)


@pytest.mark.parametrize("variant", kernels.variants())
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_in_place(variant, dtype, op):
    inputs = contributions(dtype, 3)
    for target in range(3):
        buffers = [bytearray(data) for data in inputs]
        assert fold(variant, buffers, dtype, op, buffers[target]) == expected(inputs, dtype, op)


@pytest.mark.parametrize("variant", kernels.variants())
def test_threads_share_a_variant(variant):
    of = DType.FLOAT32, ReduceOp.SUM

    def work(number):
        inputs = contributions(DType.FLOAT32, 5, (1 << 15) + number)
        return all(fold(variant, inputs, *of) == expected(inputs, *of) for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


@pytest.mark.parametrize("variant", COMPILED)
def test_subnormals_survive_a_thread_that_flushes_them(variant):
    torch = pytest.importorskip("torch")
    smallest = np.array([1, 1, 0x00800000], "<u4").tobytes()
    doubled = np.array([2, 2, 0x01000000], "<u4").tobytes()
    sums = [(DType.FLOAT32, [smallest, smallest], doubled)]
    for dtype in BLOCKS:
        blocks = contributions(dtype, 3)
        sums.append((dtype, blocks, expected(blocks, dtype, ReduceOp.SUM)))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        found = [fold(variant, inputs, dtype, ReduceOp.SUM) for dtype, inputs, _ in sums]
    finally:
        torch.set_flush_denormal(False)
    assert found == [total for *_, total in sums]
