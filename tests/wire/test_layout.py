"""Buffer -> shards -> chunks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.layout import auto_chunk_bytes, auto_chunk_limit, charge, chunks, shards

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


@given(st.integers(0, 1 << 20), REDUCERS, st.integers(1, 400).map(lambda n: 64 * n))
def test_chunks_cover_every_byte_once(total: int, reducers: int, chunk_bytes: int) -> None:
    at = 0
    bounds = shards(total, reducers)
    for chunk in chunks(total, reducers, chunk_bytes):
        assert chunk.offset == at
        assert 0 < chunk.nbytes <= chunk_bytes or total == 0
        start, end = bounds[chunk.reducer]
        assert start <= chunk.offset <= chunk.offset + chunk.nbytes <= end
        at += chunk.nbytes
    assert at == total


def test_an_empty_buffer_is_one_empty_chunk() -> None:
    assert list(chunks(0, 3, 64)) == [(0, 0, 0)]


@given(TOTALS, REDUCERS)
def test_the_rule_for_chunks(total: int, reducers: int) -> None:
    chunk_bytes = auto_chunk_bytes(total, reducers)
    assert chunk_bytes % (64 << 10) == 0
    assert 64 << 10 <= chunk_bytes <= auto_chunk_limit(reducers) <= 1 << 20
    assert reducers > 128 or 2 * reducers * chunk_bytes <= 16 << 20


def test_the_smallest_contribution_takes_something_of_a_window() -> None:
    assert [charge(nbytes) for nbytes in (0, 1, 1024, 1025)] == [1024, 1024, 1024, 1025]
