"""BLOCK8 by its specification (`reducer/wire/README.md`, section 4), without the product's code.

A block has 256 bytes: a little-endian float32 scale, and 252 int8.
"""

from __future__ import annotations

import numpy as np

VALUES, BYTES = 252, 256


def travels(values: np.ndarray, *, dithered: bool = False) -> np.ndarray:
    """Return float32 values as the bytes that are sent: one row for each block.

    Args:
        values: of one dimension.
        dithered: whether as reducers send them.
    """
    filled = np.zeros(-(-values.size // VALUES) * VALUES, np.float32)
    filled[: values.size] = values.reshape(-1)
    rows = filled.reshape(-1, VALUES)
    sent = np.zeros((len(rows), BYTES), np.uint8)
    with np.errstate(all="ignore"):
        m = np.abs(rows).max(axis=1, initial=0)
        scale = m / np.float32(127)
        products = rows * (np.float32(127) / m)[:, None]
        if dithered:
            products = products + dither(rows)
    bad = ~np.isfinite(rows).all(axis=1)
    tiny = ~bad & (m < 2.0**-100)
    usual = ~(bad | tiny)
    scale[tiny] = 0
    sent[:, :4] = scale.astype("<f4").view(np.uint8).reshape(-1, 4)
    sent[bad, :4] = np.frombuffer(bytes.fromhex("0000c07f"), np.uint8)
    # np.round takes of two integers the even one, and float64 holds the product exactly.
    sent[usual, 4:] = np.round(products[usual].astype(np.float64)).astype(np.int8).view(np.uint8)
    return sent


def dither(rows: np.ndarray) -> np.ndarray:
    """Return what a reducer adds to each value of rows of 252 before it rounds it."""
    # In 64 bits, of which the lower 32 count, with one byte's place in a block for each column.
    bits = rows.view(np.uint32).astype(np.uint64)
    low = np.uint64(2**32 - 1)
    place = np.arange(4, 256, dtype=np.uint64)
    h = ((bits ^ (place * np.uint64(2654435761) & low)) * np.uint64(2246822507)) & low
    h = ((h ^ (h >> np.uint64(15))) * np.uint64(3266489909)) & low
    twelve = (h // np.uint64(2**20)).astype(np.float64)
    return ((twelve + 0.5) / 4096 - 0.5).astype(np.float32)


def arrives(sent: np.ndarray, count: int | None = None) -> np.ndarray:
    """Return the float32 values of rows of bytes, every NaN being the quiet one."""
    scale = sent[:, :4].copy().view("<f4")
    with np.errstate(all="ignore"):
        values = (scale * sent[:, 4:].view(np.int8).astype(np.float32)).reshape(-1)
    values[np.isnan(values)] = np.nan
    return values[:count]


def folded(inputs: list[np.ndarray], *, mean: bool = False) -> np.ndarray:
    """Return what a reducer makes of the bytes of all ranks, in their order."""
    total = arrives(inputs[0])
    with np.errstate(all="ignore"):
        for sent in inputs[1:]:
            total = total + arrives(sent)
        if mean:
            total = total / np.float32(len(inputs))
    return travels(total, dithered=True)


def reduced(given: list[np.ndarray], *, mean: bool) -> np.ndarray:
    """Return what every rank gets of float32 values that all ranks give."""
    return arrives(folded([travels(values) for values in given], mean=mean), given[0].size)
