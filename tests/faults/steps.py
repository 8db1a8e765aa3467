"""All-reduces over a network with faults: exact, or a typed error in time, never anything else."""

import time
from typing import NamedTuple

import numpy as np

from reducer.errors import ReductionError
from worker_client.work import Work

COUNT = 200_000  # elements, 800 kB: a share and several chunks for each of two reducers


class Step(NamedTuple):
    """One all-reduce of all ranks, and what each must get."""

    works: list[Work]
    expected: np.ndarray


def begin(clients, number, count=COUNT):
    """Start an all-reduce whose every element tells rank, place and step apart.

    The sums are whole numbers below 2^24, so that they are exact in float32.
    """
    place = np.arange(count, dtype=np.float32) % 1009
    parts = [place * (rank + 1) + 1_000 * number for rank in range(len(clients))]
    expected = np.stack(parts).sum(axis=0, dtype=np.float32)
    works = [client.all_reduce(part, op="sum") for client, part in zip(clients, parts, strict=True)]
    return Step(works, expected)


def exact_or_typed(step, within_s):
    """Wait until a step has ended at every rank, and return the errors.

    Raises:
        AssertionError: a rank has a wrong sum, or nothing yet.
    """
    deadline = time.monotonic() + within_s
    ends = [_end(work, deadline) for work in step.works]
    for rank, (work, end) in enumerate(zip(step.works, ends, strict=True)):
        assert work.done(), f"rank {rank} still waits after {within_s:g} s"
        if not isinstance(end, ReductionError):
            wrong = np.flatnonzero(end != step.expected)
            assert not wrong.size, f"rank {rank} has wrong sums from element {wrong[0]} on"
    return [end for end in ends if isinstance(end, ReductionError)]


def _end(work, deadline):
    try:
        return work.wait(max(0.0, deadline - time.monotonic()))
    except ReductionError as error:
        return error


def exact(step, within_s=10.0):
    """Wait for a step that nothing keeps from ending well."""
    assert exact_or_typed(step, within_s) == []


def works_again(clients, within_s=5.0):
    """Make steps until one is exact at every rank; none may be worse than a typed error."""
    deadline = time.monotonic() + within_s
    number = 100
    while errors := exact_or_typed(begin(clients, number), within_s):
        assert time.monotonic() < deadline, f"the job does not come back: {errors}"
        number += 1
        time.sleep(0.02)  # between attempts: that a reducer is back cannot be waited for


def works_again_or_says_why_not(clients, steps=5):
    """Make steps that are exact, or have a typed error, at every rank."""
    for number in range(100, 100 + steps):
        exact_or_typed(begin(clients, number), within_s=3)
