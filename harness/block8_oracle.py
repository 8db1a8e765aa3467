"""Blocks by their specification (`docs/protocol.md`, section 4), without the product's code.

A block has 256 bytes: a little-endian float32 scale, and 252 int8 or E4M3, by the setting that it
is sent with: ``int8`` or ``fp8_e4m3``.
"""

import ml_dtypes
import numpy as np

VALUES, BYTES = 252, 256
Q = {"int8": np.dtype(np.int8), "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
LARGEST = {"int8": np.float32(127), "fp8_e4m3": np.float32(448)}


def travels(values: np.ndarray, wire: str = "int8", *, dithered: bool = False) -> np.ndarray:
    """Return float32 values as the bytes that are sent, `dithered` by reducers: a row a block."""
    filled = np.zeros(-(-values.size // VALUES) * VALUES, np.float32)
    filled[: values.size] = values.reshape(-1)
    rows = filled.reshape(-1, VALUES)
    sent = np.zeros((len(rows), BYTES), np.uint8)
    with np.errstate(all="ignore"):
        m = np.abs(rows).max(axis=1, initial=0)
        scale = m / LARGEST[wire]
        y = rows * (LARGEST[wire] / m)[:, None]
    bad = ~np.isfinite(rows).all(axis=1)
    tiny = ~bad & (m < 2.0**-100)
    usual = ~(bad | tiny)
    scale[tiny] = 0
    sent[:, :4] = scale.astype("<f4").view(np.uint8).reshape(-1, 4)
    sent[bad, :4] = np.frombuffer(bytes.fromhex("0000c07f"), np.uint8)
    to_q = _to_int8 if wire == "int8" else _to_e4m3
    sent[usual, 4:] = to_q(y[usual], dither(rows[usual]) if dithered else None).view(np.uint8)
    return sent


def _to_int8(y: np.ndarray, d: np.ndarray | None) -> np.ndarray:
    # np.round takes of two integers the even one, and float64 holds the sum exactly.
    return np.round((y if d is None else y + d).astype(np.float64)).astype(np.int8)


def _to_e4m3(y: np.ndarray, d: np.ndarray | None) -> np.ndarray:
    if d is None:
        return y.astype(Q["fp8_e4m3"])
    size = np.abs(y)
    s = np.where(size < 2.0**-6, 2.0**-9, np.exp2(np.frexp(size)[1] - 4.0)).astype(np.float32)
    steps = np.round((size / s + d).astype(np.float64))
    q: np.ndarray = np.copysign(s * steps, y).astype(Q["fp8_e4m3"])
    return q


def dither(rows: np.ndarray) -> np.ndarray:
    """Return d of the specification for each value of rows of 252, float32."""
    # In 64 bits, of which the lower 32 count, with one byte's place in a block for each column.
    bits = rows.view(np.uint32).astype(np.uint64)
    low = np.uint64(2**32 - 1)
    place = np.arange(4, 256, dtype=np.uint64)
    h = ((bits ^ (place * np.uint64(2654435761) & low)) * np.uint64(2246822507)) & low
    h = ((h ^ (h >> np.uint64(15))) * np.uint64(3266489909)) & low
    twelve = (h // np.uint64(2**20)).astype(np.float64)
    return ((twelve + 0.5) / 4096 - 0.5).astype(np.float32)


def arrives(sent: np.ndarray, count: int | None = None, wire: str = "int8") -> np.ndarray:
    """Return the float32 values of rows of bytes, every NaN being the quiet one."""
    scale = sent[:, :4].copy().view("<f4")
    with np.errstate(all="ignore"):
        values: np.ndarray = scale * sent[:, 4:].view(Q[wire]).astype(np.float32)
    values = values.reshape(-1)
    values[np.isnan(values)] = np.nan
    return values[:count]


def folded(inputs: list[np.ndarray], wire: str = "int8", *, mean: bool = False) -> np.ndarray:
    """Return what a reducer makes of the bytes of all ranks, in their order."""
    total = arrives(inputs[0], wire=wire)
    with np.errstate(all="ignore"):
        for sent in inputs[1:]:
            total = total + arrives(sent, wire=wire)
        if mean:
            total = total / np.float32(len(inputs))
    return travels(total, wire, dithered=True)


def reduced(given: list[np.ndarray], wire: str = "int8", *, mean: bool) -> np.ndarray:
    """Return what every rank gets of float32 values that all ranks give."""
    sent = [travels(values, wire) for values in given]
    return arrives(folded(sent, wire, mean=mean), given[0].size, wire)
