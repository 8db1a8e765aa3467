"""Chooses chunk, window and fusion threshold by trying: a short sweep before a job begins.

What is best depends on links, round trips and processors, which no rule knows. Every rank makes the
same trials at the same time, and the slowest rank's time of each counts, so all choose alike.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worker_client.client.client import Client

CHUNKS = (0, 64 << 10, 256 << 10, 1 << 20)  # bytes; 0 is what flow control chooses
WINDOWS = (0, 2 << 20, 8 << 20, 32 << 20)
TRIAL_BYTES = 16 << 20
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)  # of fusion buffers
TIMES = 3
WARM_UP = 3  # calls, by which `auto` has measured the links
ENOUGH = 0.95  # of the best rate: smaller fusion buffers begin earlier

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What was found to be best.

    Attributes:
        chunk_bytes, window_bytes: 0 for automatic.
        fusion_threshold: bytes.
    """

    chunk_bytes: int
    window_bytes: int
    fusion_threshold: int


def sweep(make: Callable[[str, int, int], Client], given: Mapping[str, int]) -> Choice:
    """Try sizes of chunks and windows, then of fusion buffers; every rank calls this.

    It takes about as long as 600 MB take on the links.

    Args:
        make: makes a client of a job of its own, given what to call it, and the sizes of chunks and
            windows in bytes.
        given: fields of the choice that are not to be found.

    Raises:
        ReductionError: as `Client.all_reduce`.
    """
    rates: dict[tuple[int, int], float] = {}

    def rate(chunk_bytes: int, window_bytes: int) -> float:
        key = (chunk_bytes, window_bytes)
        if key not in rates:
            with make(f"tune{len(rates)}", *key) as client:
                rates[key] = _rate(client, TRIAL_BYTES)
            log.info("chunks %s, window %s: %.1f MB/s", *map(_size, key), rates[key] / 1e6)
        return rates[key]

    first, *_ = windows = _candidates(given, "window_bytes", WINDOWS)
    chunk = max(_candidates(given, "chunk_bytes", CHUNKS), key=lambda chunk: rate(chunk, first))
    window = max(windows, key=lambda window: rate(chunk, window))
    if "fusion_threshold" in given:
        return Choice(chunk, window, given["fusion_threshold"])
    with make(f"tune{len(rates)}", chunk, window) as client:
        by_size = {size: _rate(client, size) for size in SIZES}
    for size, found in by_size.items():
        log.info("fusion buffers of %s: %.1f MB/s", _size(size), found / 1e6)
    enough = ENOUGH * max(by_size.values())
    threshold = next(size for size, found in by_size.items() if found >= enough)
    log.info(
        "chosen: REDUCTION_CHUNK_BYTES=%s REDUCTION_WINDOW_BYTES=%s REDUCTION_FUSION_THRESHOLD=%s",
        *map(_size, (chunk, window, threshold)),
    )
    return Choice(chunk, window, threshold)


def _candidates(given: Mapping[str, int], name: str, others: tuple[int, ...]) -> tuple[int, ...]:
    return (given[name],) if name in given else others


def _rate(client: Client, nbytes: int) -> float:
    """Return how many bytes of such all-reduces pass in a second, at the slowest rank."""
    data = np.zeros(nbytes // 4, np.float32)
    for _ in range(WARM_UP):
        client.all_reduce(data[: 1 << 18], "sum").wait()
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        client.all_reduce(data, "sum").wait()
        seconds.append(time.perf_counter() - begin)
    slowest = np.array([median(seconds)])
    client.all_reduce(slowest, "max").wait()
    return nbytes / float(slowest[0])


def _size(nbytes: int) -> str:
    if nbytes == 0:
        return "auto"
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"
