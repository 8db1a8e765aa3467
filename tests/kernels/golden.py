"""Digests that the results of kernels and casts must have on every CPU: ``golden.json``.

A case is a kernel or a cast, with requests of ragged lengths and of several numbers of ranks. Its
digest is the SHA-256 of all results, computed here by NumPy and without the product's code::

    .venv/bin/python -m tests.kernels.golden        # writes golden.json anew

The inputs are made of SHAKE-256 alone, so that they never change. They hold values of similar size,
whose sums round, any bits at all, and special ones: both zeros, subnormal numbers, which are kept,
infinities, and quiet and signalling NaNs of both signs with payloads, of which a result has the
positive quiet one without payload (`reducer/kernels/fold.h` says what else is defined).
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from harness import block8_oracle as block8

Array = np.ndarray

TABLE = Path(__file__).with_name("golden.json")
WIDTHS = {  # of floating types: bits of the exponent and of the mantissa
    "FLOAT32": (8, 23),
    "FLOAT64": (11, 52),
    "FLOAT16": (5, 10),
    "BFLOAT16": (8, 7),
}
INTEGERS = {"INT8": "<i1", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1"}
BLOCKS = {"BLOCK8": "int8", "BLOCK8_E4M3": "fp8_e4m3"}
NARROW = ("FLOAT16", "BFLOAT16", *BLOCKS)
RANKS = (1, 2, 3, 8, 17)
COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 1000)
BLOCK_COUNTS = (1, 2, 3, 5)
CAST_COUNTS = (*COUNTS, 251, 252, 253, 503, 505)
DIVISORS = (3.0, 7.0, 16.0)


class Request(NamedTuple):
    """One call: inputs as bytes, and the result's length in bytes; `by` is a divisor."""

    kind: str
    dtype: str
    op: str
    inputs: tuple[bytes, ...]
    nbytes: int
    by: float = 0.0


def cases():
    """Return all cases by name, such as ``fold FLOAT32 SUM`` and ``narrow BLOCK8``."""
    found = {}
    for dtype in (*WIDTHS, *INTEGERS, *BLOCKS):
        for op in ("SUM", "MEAN", "MIN", "MAX", "PRODUCT"):
            undefined = op == "MEAN" if dtype in INTEGERS else op not in ("SUM", "MEAN")
            if not undefined or dtype in WIDTHS:
                found[f"fold {dtype} {op}"] = list(_folds(dtype, op))
    for dtype in NARROW:
        for kind in ("narrow", "keep", "widen"):
            found[f"{kind} {dtype}"] = [_cast(kind, dtype, count) for count in CAST_COUNTS]
    for dtype in ("FLOAT32", "FLOAT64"):
        given = [(contribution(dtype, count, 0), by) for count in COUNTS for by in DIVISORS]
        found[f"divide {dtype}"] = [
            Request("divide", dtype, "", (values,), len(values), by) for values, by in given
        ]
    return found


def _folds(dtype, op):
    for n in RANKS:
        for count in BLOCK_COUNTS if dtype in BLOCKS else COUNTS:
            inputs = tuple(contribution(dtype, count, rank) for rank in range(n))
            yield Request("fold", dtype, op, inputs, len(inputs[0]))


def _cast(kind, dtype, count):
    floats, residual = (contribution("FLOAT32", count, rank) for rank in range(2))
    blocks = -(-count // block8.VALUES)
    nbytes = blocks * block8.BYTES if dtype in BLOCKS else 2 * count
    if kind == "widen":
        sent = contribution(dtype, blocks if dtype in BLOCKS else count, 0)
        return Request(kind, dtype, "", (sent,), 4 * count)
    if kind == "keep":
        return Request(kind, dtype, "", (floats, residual), nbytes + 4 * count)
    return Request(kind, dtype, "", (floats,), nbytes)


def contribution(dtype, count, rank):
    """Return `count` elements of a rank, or so many blocks."""
    label = f"{dtype} {count} {rank}"
    if dtype in INTEGERS:
        return _random(label, count * np.dtype(INTEGERS[dtype]).itemsize).tobytes()
    if dtype not in BLOCKS:
        return _floats(label, count, *WIDTHS[dtype]).tobytes()
    blocks = _random(label, count * block8.BYTES).reshape(count, block8.BYTES).copy()
    blocks[:, :4] = _floats(label, count, *WIDTHS["FLOAT32"]).view(np.uint8).reshape(count, 4)
    if dtype == "BLOCK8_E4M3" and count != BLOCK_COUNTS[-1]:
        q = blocks[:, 4:]
        q[(q & 0x7F) == 0x7F] ^= (
            1  # else nearly every block would have a NaN, and give nothing else
        )
    return blocks.tobytes()


def _random(label, nbytes):
    return np.frombuffer(hashlib.shake_256(label.encode()).digest(nbytes), np.uint8)


def _floats(label, count, exponent, mantissa):
    """Return floating numbers as bits: three quarters of them within 2^-4 to 2^4."""
    itemsize = (1 + exponent + mantissa) // 8
    bits = _random(label, count * itemsize).view(f"<u{itemsize}")
    unsigned = bits.dtype.type
    sign, infinity = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    special = [
        *(0, sign, 1, sign | 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1),
        *(sign | (infinity - 1), infinity, sign | infinity),
        *(infinity | quiet, sign | infinity | quiet | 3, infinity | 1),
    ]
    least = (1 << (exponent - 1)) - 5  # with the bias: 2^-4
    similar = bits & unsigned(sign | ((1 << mantissa) - 1) | 7 << mantissa)
    similar = similar + unsigned(least << mantissa)
    which = _random(f"{label} which", 2 * count).reshape(2, count)
    chosen = np.array(special, bits.dtype)[which[1] % len(special)]
    return np.where(which[0] < 192, similar, np.where(which[0] < 240, bits, chosen))


def called(call, offset, *buffers):
    """Call with copies of buffers that begin `offset` bytes into lines of 64.

    Returns:
        The bytes of each afterwards; nothing beside them has changed.
    """
    rooms, parts = [], []
    for data in buffers:
        room = np.full(len(data) + 256, 0xA5, np.uint8)
        start = -room.ctypes.data % 64 + 64 + offset
        parts.append(slice(start, start + len(data)))
        room[parts[-1]] = np.frombuffer(data, np.uint8)
        rooms.append(room)
    call(*(room[part].data for room, part in zip(rooms, parts, strict=True)))
    ends = tuple(room[part].tobytes() for room, part in zip(rooms, parts, strict=True))
    for room, part in zip(rooms, parts, strict=True):
        room[part] = 0xA5
        assert (room == 0xA5).all()
    return ends


def result(request):
    """Return what a request must give."""
    with np.errstate(all="ignore"):
        return {"fold": _folded, "divide": _divided, "widen": _widened}.get(
            request.kind, _narrowed
        )(request)


def _folded(request):
    dtype, op = request.dtype, request.op
    if dtype in BLOCKS:
        rows = [np.frombuffer(sent, np.uint8).reshape(-1, block8.BYTES) for sent in request.inputs]
        return block8.folded(rows, BLOCKS[dtype], mean=op == "MEAN").tobytes()
    total = numbers(request.inputs[0], dtype)
    for given in request.inputs[1:]:
        x = numbers(given, dtype)
        if op in ("SUM", "MEAN"):
            total = total + x
        elif op == "PRODUCT":
            total = total * x
        else:
            better = x < total if op == "MIN" else x > total
            total = np.where(better | np.not_equal(x, x), x, total)
    if op == "MEAN":
        total = total / total.dtype.type(len(request.inputs))
    return rounded(total, dtype)


def _divided(request):
    values = numbers(request.inputs[0], request.dtype)
    return rounded(values / values.dtype.type(request.by), request.dtype)


def _widened(request):
    if request.dtype in BLOCKS:
        rows = np.frombuffer(request.inputs[0], np.uint8).reshape(-1, block8.BYTES)
        return block8.arrives(rows, request.nbytes // 4, BLOCKS[request.dtype]).tobytes()
    return rounded(numbers(request.inputs[0], request.dtype), "FLOAT32")


def _narrowed(request):
    total = numbers(request.inputs[0], "FLOAT32")
    if request.kind == "narrow":
        return _sent(total, request.dtype)
    total = total + numbers(request.inputs[1], "FLOAT32")
    sent = _sent(total, request.dtype)
    if request.dtype in BLOCKS:
        rows = np.frombuffer(sent, np.uint8).reshape(-1, block8.BYTES)
        kept = total - block8.arrives(rows, total.size, BLOCKS[request.dtype])
    else:
        kept = total - numbers(sent, request.dtype)
    return sent + np.where(np.isfinite(kept), kept, np.float32(0)).tobytes()


def _sent(values, dtype):
    if dtype in BLOCKS:
        return block8.travels(values, BLOCKS[dtype]).tobytes()
    return rounded(values, dtype)


def numbers(data, dtype):
    """Return elements in the type in which a fold adds them up."""
    if dtype in INTEGERS:
        return np.frombuffer(data, INTEGERS[dtype])
    if dtype == "BFLOAT16":
        return np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32)
    found = np.frombuffer(data, f"<f{np.dtype(dtype.lower()).itemsize}")
    return found.astype(np.float32) if dtype == "FLOAT16" else found


def rounded(values, dtype):
    """Return values as elements; every NaN is the positive quiet one."""
    if dtype in INTEGERS:
        return values.tobytes()
    to = ml_dtypes.bfloat16 if dtype == "BFLOAT16" else np.dtype(dtype.lower())
    elements = values.astype(to)
    exponent, mantissa = WIDTHS[dtype]
    bits = elements.view(f"<u{elements.itemsize}").copy()
    bits[np.isnan(values)] = ((2 << exponent) - 1) << (mantissa - 1)
    return bits.tobytes()


def digest(results):
    """Return a case's digest."""
    return hashlib.sha256(b"".join(results)).hexdigest()


def main():
    """Write the table."""
    table = {
        name: digest([result(request) for request in requests])
        for name, requests in cases().items()
    }
    TABLE.write_text(json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main()
