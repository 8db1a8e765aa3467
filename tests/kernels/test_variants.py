"""Every compiled variant gives the bits of the NumPy twin; `test_block8` has blocks."""

import threading

import numpy as np
import pytest

from reducer import kernels
from reducer.kernels.plain import PlainKernels
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
    """What `golden` has of n ranks; of blocks, which are long, fewer."""
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


def fold(name, inputs, dtype, op):
    out = bytearray(len(inputs[0]))
    kernels.select(name).reduce(inputs, out, dtype, op)
    return bytes(out)


def test_the_extension_is_built():
    assert "generic" in COMPILED


@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize(("dtype", "op"), WITHOUT_BLOCKS)
def test_same_bits_as_numpy(variant, dtype, op):
    compiled = kernels.select(variant)
    canary = b"\xa5" * WIDEST_VECTOR
    for n in INPUT_COUNTS:
        inputs = contributions(dtype, n)
        expected = bytearray(len(inputs[0]))
        PlainKernels().reduce(inputs, expected, dtype, op)
        for offset in (0, 1, 3):
            views = [
                misaligned(data, offset if rank % 2 else 0) for rank, data in enumerate(inputs)
            ]
            for count in counts(dtype):
                nbytes = count * dtype.itemsize
                room = bytearray(offset) + canary + bytes(nbytes) + canary
                out = memoryview(room)[offset + len(canary) :][:nbytes]
                compiled.reduce([view[:nbytes] for view in views], out, dtype, op)
                whole = bytes(offset) + canary + expected[:nbytes] + canary
                assert room == whole, f"{n=} {count=} {offset=}"


@pytest.mark.parametrize("variant", COMPILED)
@pytest.mark.parametrize("dtype", SPECIAL)
def test_every_16_bit_pattern(variant, dtype):
    every = np.arange(1 << 16, dtype="<u2").tobytes()
    assert fold(variant, [every], dtype, ReduceOp.SUM) == fold(
        "numpy", [every], dtype, ReduceOp.SUM
    )
    for partner in SPECIAL[dtype]:
        other = np.full(1 << 16, partner, "<u2").tobytes()
        for op in ReduceOp:
            inputs = [every, other]
            assert fold(variant, inputs, dtype, op) == fold("numpy", inputs, dtype, op)


@pytest.mark.parametrize("variant", COMPILED)
def test_many_inputs(variant):
    inputs = contributions(DType.BFLOAT16, 1025, 65)
    expected = fold("numpy", inputs, DType.BFLOAT16, ReduceOp.MEAN)
    assert fold(variant, inputs, DType.BFLOAT16, ReduceOp.MEAN) == expected


@pytest.mark.parametrize("variant", kernels.variants())
@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_in_place(variant, dtype, op):
    inputs = contributions(dtype, 3)
    expected = fold(variant, inputs, dtype, op)
    for target in range(3):
        buffers = [bytearray(data) for data in inputs]
        kernels.select(variant).reduce(buffers, buffers[target], dtype, op)
        assert buffers[target] == expected


@pytest.mark.parametrize("variant", kernels.variants())
def test_threads_share_a_variant(variant):
    shared = kernels.select(variant)
    inputs = [contributions(DType.FLOAT32, 5, (1 << 15) + number) for number in range(4)]
    expected = [fold("numpy", group, DType.FLOAT32, ReduceOp.SUM) for group in inputs]
    wrong = []

    def work(k):
        for _ in range(20):
            out = bytearray(len(expected[k]))
            shared.reduce(inputs[k], out, DType.FLOAT32, ReduceOp.SUM)
            if out != expected[k]:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("variant", COMPILED)
def test_subnormals_survive_a_thread_that_flushes_them(variant):
    torch = pytest.importorskip("torch")
    smallest = np.array([1, 1, 0x00800000], "<u4").tobytes()
    doubled = np.array([2, 2, 0x01000000], "<u4").tobytes()
    sums = [(DType.FLOAT32, [smallest, smallest], doubled)]
    for dtype in BLOCKS:
        blocks = contributions(dtype, 3)
        sums.append((dtype, blocks, fold("numpy", blocks, dtype, ReduceOp.SUM)))
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        found = [fold(variant, inputs, dtype, ReduceOp.SUM) for dtype, inputs, _ in sums]
    finally:
        torch.set_flush_denormal(False)
    assert found == [expected for *_, expected in sums]
