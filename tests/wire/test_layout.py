"""Buffer -> shards -> chunks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.constants import PLACES
from reducer.wire.layout import (
    LARGEST_CHUNK,
    MIN_SHARD,
    SMALLEST_CHUNK,
    chunk_size,
    chunk_size_of,
    cost,
    mixed_weights,
    shards,
)

TOTALS = st.integers(0, 1 << 40) | st.integers(0, 10_000) | st.integers(0, 64 * MIN_SHARD)
WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=100).filter(any)
SEQUENCES = st.integers(0, 1 << 63)


@given(TOTALS, WEIGHTS, SEQUENCES, st.sampled_from([1, 256]))
def test_shards_are_aligned_and_cover_the_buffer(total, weights, sequence, itemsize):
    total *= itemsize
    cut = shards(total, weights, sequence, itemsize=itemsize)
    assert cut[0].start == 0
    assert cut[-1].end == total
    assert all(a.end == b.start for a, b in pairwise(cut))
    assert all(shard.start % 64 == shard.start % itemsize == 0 for shard in cut)
    assert all(shard.end % itemsize == 0 for shard in cut), "a block is cut"
    assert all(shard.end > shard.start for shard in cut) or (total == 0 and len(cut) == 1)
    assert len({shard.reducer for shard in cut}) == len(cut)
    assert all(weights[shard.reducer] for shard in cut)


@given(TOTALS, WEIGHTS, SEQUENCES)
def test_shards_are_as_large_as_their_weights_say(total, weights, sequence):
    owners = sum(weight > 0 for weight in weights)
    cut = shards(total, weights, sequence)
    if total > MIN_SHARD * (owners - 1):
        exact = [total * weights[shard.reducer] / sum(weights) for shard in cut]
    else:
        count = max(1, -(-total // MIN_SHARD))
        exact = [total / count] * count
    for shard, size in zip(cut, exact, strict=False):
        assert abs(shard.end - shard.start - size) < 128


@given(TOTALS, TOTALS, WEIGHTS, SEQUENCES)
def test_ranks_that_disagree_on_the_size_meet(total, other, weights, sequence):
    first, second = shards(total, weights, sequence), shards(other, weights, sequence)
    assert first[0].reducer == second[0].reducer


def test_small_buffers_go_to_each_reducer_in_turn():
    firsts = [shards(64, [1, 1, 0, 1], PLACES * call + 1)[0].reducer for call in range(6)]
    assert firsts == [0, 1, 3, 0, 1, 3]
    # The question before a call goes where the call goes, and its further all-reduces in turn.
    places = [shards(64, [1, 1, 0, 1], 4 * PLACES + place)[0].reducer for place in range(5)]
    assert places == [1, 1, 3, 0, 1]
    assert shards(0, [1, 1, 1], 3) == [(2, 0, 0)], "an empty buffer is one empty chunk"


@pytest.mark.parametrize(
    ("rate", "nbytes"),
    [
        (0.0, SMALLEST_CHUNK),
        (119e6, 64 << 10),  # 1 Gbit/s,
        (136e6, 64 << 10),  # and the most that was measured of it
        (298e6, 128 << 10),
        (1.2e9, 512 << 10),
    ],
)
def test_the_measure_of_chunks_is_what_a_link_carries_in_a_time(rate, nbytes):
    assert chunk_size(rate) == nbytes


@pytest.mark.parametrize(
    ("total", "count", "measure", "nbytes"),
    [
        (0, 1, 64 << 10, 32 << 10),
        ((2 << 20) - 1, 4, 64 << 10, 32 << 10),
        (2 << 20, 4, 64 << 10, 64 << 10),
        (3 << 20, 4, 256 << 10, 128 << 10),
        (3 << 20, 4, 512 << 10, LARGEST_CHUNK),
        (64 << 20, 4, 64 << 20, LARGEST_CHUNK),
        (1 << 40, 1, 64 << 10, 64 << 10),
    ],
)
def test_short_shards_have_shorter_chunks(total, count, measure, nbytes):
    assert chunk_size_of(total, count, measure) == nbytes


def test_the_smallest_contribution_takes_something_of_a_window():
    assert [cost(nbytes) for nbytes in (0, 1, 1024, 1025)] == [1024, 1024, 1024, 1025]


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("pool", range(10))
def test_a_mixed_job_keeps_every_link_equally_busy(workers, pool):
    weights = mixed_weights(workers, pool)
    assert len(weights) == pool + workers
    if workers == 1:
        return  # nothing has to travel
    share = [weight / sum(weights) for weight in weights]
    # In and out of a worker's link: what others own of its buffer, and what it owns of others'.
    worker = (1 - share[-1]) + (workers - 1) * share[-1]
    assert worker == pytest.approx(1 + (workers - 2) * share[-1])
    if 0 < pool < workers:
        assert workers * share[0] == pytest.approx(worker)  # the pool's links take as long
    if pool >= workers:
        assert worker == 1
    if pool == 0:
        assert worker == pytest.approx(2 * (workers - 1) / workers)  # as a ring
