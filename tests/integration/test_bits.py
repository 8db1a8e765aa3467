"""The guarantee: every rank gets the oracle's bits, whatever the pool, the chunks or the kernel."""

from itertools import combinations, product

import pytest

from reducer import kernels
from tests.conftest import joined, local_pool
from tests.integration.calls import check_bits
from torture.guarantee_oracle import FLOATS, TYPES

WORLD_SIZES = range(1, 10)
SIZES = (0, 1, 7, 1023, 65537, 10**6 + 1)  # elements
REDUCERS = (1, 2, 3)
CHUNKS = ("64KiB", "1MiB")
CASES = (
    *product(FLOATS, ("sum", "mean", "min", "max", "product")),
    *product(sorted(TYPES.keys() - set(FLOATS)), ("sum", "min", "max", "product")),
)


def clients(world_size, servers, chunk_bytes):
    job = f"bits-{world_size}-{chunk_bytes}"
    return joined(world_size, servers=servers, job=job, chunk_bytes=chunk_bytes)


def covering_array():
    """Reducers, ranks and chunks of some jobs, and the all-reduces that each makes.

    Every two values of any two of dtype and op, size, ranks, reducers and chunk size meet in one of
    the all-reduces; there are 324 of the 11,664 that all values of all five make.
    """
    jobs = []
    for reducers, world_size in product(REDUCERS, WORLD_SIZES):
        calls = [
            (*case, SIZES[(number // 3 + world_size) % len(SIZES)])
            for number, case in enumerate(CASES)
            if (number + reducers + world_size) % 3 == 0
        ]
        jobs.append((reducers, world_size, CHUNKS[(world_size + reducers) % 2], calls))
    return jobs


def test_any_two_values_meet_in_the_covering_array():
    met = set()
    for reducers, world_size, chunk_bytes, calls in covering_array():
        for dtype, op, size in calls:
            met |= set(combinations(((dtype, op), size, world_size, reducers, chunk_bytes), 2))
    values = (CASES, SIZES, WORLD_SIZES, REDUCERS, CHUNKS)
    assert met >= {pair for one, other in combinations(values, 2) for pair in product(one, other)}


def all_jobs():
    """Reducers, ranks and chunks of all jobs, which each make all-reduces of every kind."""
    calls = [(*case, size) for case, size in product(CASES, SIZES)]
    return [(*job, calls) for job in product(REDUCERS, WORLD_SIZES, CHUNKS)]


def one_job():
    """Make all-reduces of every kind in one job."""
    return [(2, 3, "64KiB", [(*case, size) for case, size in product(CASES, SIZES[:-1])])]


FIRST, *OTHERS = (name for name in kernels.variants() if name != "numpy")


@pytest.mark.timeout(400)  # 11,664 all-reduces, some of them of 8 MB at 9 ranks
@pytest.mark.parametrize(
    ("jobs", "kernel"),
    [
        (covering_array, FIRST),
        *((one_job, kernel) for kernel in OTHERS[-1:]),
        *(
            pytest.param(jobs, kernel, marks=pytest.mark.extended)
            for jobs, kernel in ((all_jobs, FIRST), *product([one_job], OTHERS[:-1]))
        ),
    ],
)
def test_every_rank_gets_the_oracles_bits(jobs, kernel):
    for reducers in REDUCERS:
        if its := [job for job in jobs() if job[0] == reducers]:
            with local_pool(reducers, kernel=kernel) as servers:
                for _, world_size, chunk_bytes, calls in its:
                    with clients(world_size, servers, chunk_bytes) as members:
                        for dtype, op, size in calls:
                            check_bits(members, dtype, op, size)
