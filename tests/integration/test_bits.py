"""The guarantee: every rank gets the oracle's bits, whatever the pool, the chunks or the kernel."""

from functools import cache
from itertools import combinations, product

import ml_dtypes
import numpy as np
import pytest

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
from tests.conftest import joined, local_pool
from tests.integration.calls import reduced

WORLD_SIZES = range(1, 10)
SIZES = (0, 1, 7, 1023, 65537, 10**6 + 1)  # elements
REDUCERS = (1, 2, 3)
CHUNKS = ("64KiB", "1MiB")
NUMPY = {
    dtype: np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.name.lower())
    for dtype in DType
    if not dtype.is_block  # no array's
}
CASES = tuple((dtype, op) for dtype, op in product(NUMPY, ReduceOp) if dtype.defines(op))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-40, 3e38)


@cache
def pattern(dtype):
    """A long row of values of one type, from which every rank's input is cut."""
    rng = np.random.default_rng(int(dtype))
    count = max(SIZES) + 1000
    if not dtype.is_floating:
        info = np.iinfo(NUMPY[dtype])
        return rng.integers(info.min, info.max, count, NUMPY[dtype], endpoint=True)
    values = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)
    where = rng.integers(0, count, count // 50)
    values[where] = rng.choice(SPECIAL, len(where))
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(NUMPY[dtype])


def inputs(dtype, size, world_size):
    return [pattern(dtype)[101 * rank :][:size].copy() for rank in range(world_size)]


@cache
def oracle(dtype, op, size, world_size):
    given = inputs(dtype, size, world_size)
    out = np.empty_like(given[0])
    sources = [array.view(np.uint8) for array in given]
    kernels.select("numpy").reduce(sources, out.view(np.uint8), dtype, op)
    return out.tobytes()


def clients(world_size, servers, chunk_bytes):
    job = f"bits-{world_size}-{chunk_bytes}"
    return joined(world_size, servers=servers, job=job, chunk_bytes=chunk_bytes)


def check(members, dtype, op, size):
    """One all-reduce of all ranks; each must end with exactly the oracle's bytes."""
    given = inputs(dtype, size, len(members))
    expected = oracle(dtype, op, size, len(members))
    for rank, result in enumerate(reduced(members, given, op)):
        assert result.tobytes() == expected, f"rank {rank} of {len(members)}: {dtype!r} {op!r}"


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


def test_every_rank_gets_the_oracles_bits_in_the_covering_array():
    jobs = covering_array()
    for reducers in REDUCERS:
        with local_pool(reducers) as servers:
            for _, world_size, chunk_bytes, calls in (job for job in jobs if job[0] == reducers):
                with clients(world_size, servers, chunk_bytes) as members:
                    for dtype, op, size in calls:
                        check(members, dtype, op, size)


@pytest.mark.extended("test_every_rank_gets_the_oracles_bits_in_the")
@pytest.mark.timeout(400)  # 11,664 all-reduces, some of them of 8 MB at 9 ranks
def test_every_rank_gets_the_oracles_bits_in_all_cases():
    done = 0
    for reducers in REDUCERS:
        with local_pool(reducers) as servers:
            for world_size, chunk_bytes in product(WORLD_SIZES, CHUNKS):
                with clients(world_size, servers, chunk_bytes) as members:
                    for (dtype, op), size in product(CASES, SIZES):
                        check(members, dtype, op, size)
                        done += 1
    assert done == len(CASES) * len(SIZES) * len(WORLD_SIZES) * len(REDUCERS) * len(CHUNKS) == 11664


FIRST, *OTHERS = kernels.variants()
KERNELS_AND_LOOPS = [
    (FIRST, "compiled"),
    *(pytest.param(kernel, "compiled", marks=pytest.mark.extended) for kernel in OTHERS[:-1]),
    *((kernel, "compiled") for kernel in OTHERS[-1:]),
    (FIRST, "plain"),
]


@pytest.mark.parametrize(
    ("world_sizes", "sizes"),
    [
        pytest.param((3,), (0, 7, 1023, 65537), id="some"),
        pytest.param((1, 3, 8), SIZES, id="every", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize(("kernel", "impl"), KERNELS_AND_LOOPS)
def test_a_second_run_gives_the_same_bits_with_any_kernel_and_either_loop(
    kernel, impl, world_sizes, sizes, monkeypatch
):
    """Each all-reduce of a test above has one right result."""
    with local_pool(2, kernel=kernel) as servers:
        monkeypatch.setenv("REDUCTION_IMPL", impl)
        for world_size in world_sizes:
            with clients(world_size, servers, "64KiB") as members:
                for (dtype, op), size in product(CASES, sizes):
                    check(members, dtype, op, size)
