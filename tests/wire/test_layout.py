"""Buffer -> shards -> chunks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.layout import auto_chunk_bytes, auto_chunk_limit, charge, ranges, shards

TOTALS = st.integers(0, 1 << 40) | st.integers(0, 10_000)
REDUCERS = st.integers(1, 300)


@given(TOTALS, REDUCERS)
def test_shards_are_equal_aligned_and_cover_the_buffer(total: int, reducers: int) -> None:
    cut = shards(total, reducers)
    assert len(cut) == reducers
    assert cut[0][0] == 0
    assert cut[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(cut))
    assert all(start % 64 == 0 or start == total for start, _ in cut)
    sizes = [-(-(end - start) // 64) for start, end in cut]
    assert max(sizes) - min(sizes) <= 1
    assert total == 0 or cut[0][1] > 0  # reducer 0 owns the first byte


@given(TOTALS, REDUCERS)
def test_ranges_cover_every_byte_once(total: int, reducers: int) -> None:
    bounds = shards(total, reducers)
    found = ranges(total, reducers)
    assert all(range_.start < range_.end for range_ in found) or total == 0
    assert all((range_.start, range_.end) == bounds[range_.link] for range_ in found)
    assert all(a.end == b.start for a, b in pairwise(found))
    assert (found[0].start, found[-1].end) == (0, total)


def test_an_empty_buffer_is_one_empty_range() -> None:
    assert ranges(0, 3) == [(0, 0, 0)]


@given(TOTALS, REDUCERS)
def test_the_rule_for_chunks(total: int, reducers: int) -> None:
    chunk_bytes = auto_chunk_bytes(total, reducers)
    assert chunk_bytes % (64 << 10) == 0
    assert 64 << 10 <= chunk_bytes <= auto_chunk_limit(reducers) <= 1 << 20
    assert reducers > 128 or 2 * reducers * chunk_bytes <= 16 << 20


def test_the_smallest_contribution_takes_something_of_a_window() -> None:
    assert [charge(nbytes) for nbytes in (0, 1, 1024, 1025)] == [1024, 1024, 1024, 1025]
