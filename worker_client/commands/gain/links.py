"""Measures what a prediction needs to know of this machine and its links."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from reducer.planning.network_model import ring_factor
from reducer.planning.step_model import WIRES
from worker_client import config
from worker_client.client.bootstrap import connect
from worker_client.staging import casts

if TYPE_CHECKING:
    from collections.abc import Callable

TRIES = 3
FIRST_BYTES, MOST_BYTES = 256 << 10, 64 << 20  # of the all-reduces that measure a link
LONG_ENOUGH_S = 0.5
ROUND_TRIPS = 20
CALLS = 200  # in flight
CAST_BYTES = 8 << 20  # of float32
# What an outer step reads and writes of memory, in sums of one array to another: pseudo-gradient,
# momentum, step, and the way back into the model (`worker_client.outer.fragment`).
OUTER_SUMS = 8


def ring_rate(group: dist.ProcessGroup) -> float:
    """Return the payload that a rank's card carries each way in Gloo's ring, bytes per second.

    All ranks call it. It is the difference of two all-reduces of which one is twice as long: what
    each costs whatever its length does not count, nor does what a link lets pass at first.
    """
    _seconds(group, FIRST_BYTES)  # which connects
    nbytes, shorter_s = FIRST_BYTES, 0.0
    while True:
        longer_s = median(_seconds(group, nbytes) for _ in range(TRIES))
        long_enough = longer_s >= LONG_ENOUGH_S and longer_s > shorter_s > 0.0
        if long_enough or nbytes >= MOST_BYTES:
            return ring_factor(group.size()) * (nbytes / 2) / max(longer_s - shorter_s, 1e-9)
        nbytes, shorter_s = 2 * nbytes, longer_s


def round_trip_s(group: dist.ProcessGroup) -> float:
    """Return the time of a message from rank 0 to rank 1 and back, median; all ranks call it."""
    data, found = torch.zeros(1), []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        if group.rank() == 0:
            dist.send(data, 1, group)
            dist.recv(data, 1, group)
        elif group.rank() == 1:
            dist.recv(data, 0, group)
            dist.send(data, 0, group)
        found.append(time.perf_counter() - begin)
    said = torch.tensor([median(found)])
    dist.broadcast(said, 0, group)
    return float(said)


def cast_s() -> dict[str, float]:
    """Return the seconds for each byte of float32 that is cast to a wire type and back."""
    floats = np.random.default_rng(0).standard_normal(CAST_BYTES // 4, np.float32)
    values, residual = (one.view(np.uint8).data for one in (floats, np.zeros_like(floats)))
    found, best = {}, casts.select()
    for name, dtype in WIRES.items():
        if dtype is None:
            continue
        wire = np.empty(dtype.nbytes(floats.size), np.uint8).data
        narrow = partial(best.narrow, values, wire, dtype)
        if dtype.is_block:  # of which DDP's hook keeps residuals
            narrow = partial(best.narrow_keeping, values, residual, wire, dtype)
        narrow_s = _median_s(narrow)
        widen_s = _median_s(partial(best.widen, wire, values, dtype))
        found[name] = (narrow_s + widen_s) / CAST_BYTES
    return found


def call_s(group: dist.ProcessGroup) -> float:
    """Return the seconds that each of many all-reduces in flight takes a client like `attach`'s.

    All ranks call it.
    """
    job = config.load().job
    data = np.zeros((CALLS, 256), np.float32)

    def all_at_once() -> None:
        for work in [client.all_reduce(row, "sum") for row in data]:
            work.wait()

    name = f"{job}/gain" if job else None
    with connect(quietly=True, job=name) as client:  # its lines would stand amid the answer
        seconds = _median_s(all_at_once) / CALLS
        dist.barrier(group)  # a rank that hosts a reducer leaves when all have their last result
    return seconds


def outer_s() -> float:
    """Return the seconds for each byte of parameters that an outer step takes without a network."""
    one, other = np.zeros((2, CAST_BYTES), np.float32)  # longer than caches
    return OUTER_SUMS * _median_s(lambda: np.add(one, other, out=one)) / one.nbytes


def _median_s(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return median(found)


def _seconds(group: dist.ProcessGroup, nbytes: int) -> float:
    """Return what an all-reduce took the slowest rank; the same at every rank."""
    data = torch.zeros(nbytes // 4)
    dist.barrier(group)
    begin = time.perf_counter()
    dist.all_reduce(data, group=group)
    said = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(said, dist.ReduceOp.MAX, group)
    return float(said)
