"""Which link carries what: lanes, weights, and plans that are kept."""

from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.constants import MAX_LANES, DType
from reducer.wire.layout import shards
from tests.engine.words import number
from worker_client.protocol import shard_map
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.link import Link
from worker_client.protocol.shard_map import Plan

KIB = 1 << 10
MIB = 1 << 20


def links(*places):
    """Links to (reducer, lane), in this order."""
    return [
        Link(index, reducer, lane, f"here:{index}") for index, (reducer, lane) in enumerate(places)
    ]


def made(weights, among, chunk_bytes=0):
    plan = Plan(weights, chunk_bytes, lambda nbytes, parts: 7 * nbytes + parts)
    plan.use(among, dict.fromkeys(range(len(weights)), MAX_LANES))
    return plan


def cut(plan, nbytes, sequence):
    parts, _ = plan.cut(nbytes, sequence, DType.INT8)
    return parts


@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    sizes=st.lists(st.sampled_from([0, 1, 70 * KIB, MIB, MIB + 1]), min_size=1, max_size=40),
    chunk_bytes=st.sampled_from([0, 64, 64 * KIB]),
    dtypes=st.lists(
        st.sampled_from([DType.INT8, DType.FLOAT64, DType.BLOCK8]), min_size=1, max_size=3
    ),
)
def test_a_plan_that_was_kept_is_the_one_that_would_be_made(weights, sizes, chunk_bytes, dtypes):
    plan = made(tuple(weights), links(*((r, 0) for r in range(len(weights)))), chunk_bytes)
    for call, nbytes in enumerate(sizes):
        for sequence in (number(call), number(call, FIRST_PLACE + 1)):
            for dtype in dtypes:
                cut, size = plan.cut(nbytes, sequence, dtype)
                parts = [(part.link, part.start, part.end) for part in cut]
                assert parts == shards(nbytes, weights, sequence, chunk_bytes, dtype.itemsize)
                assert size == 7 * nbytes + len(parts)  # as `made` says


def test_calls_and_the_all_reduces_of_each_begin_in_turn_at_every_reducer():
    plan = made((1, 1, 1), links((0, 0), (1, 0), (2, 0)))
    numbers = [number(call, place) for call in range(3) for place in (1, 2, 3)]
    first = [cut(plan, 9 * MIB, sequence)[0].link for sequence in numbers]
    assert first == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_lanes_divide_their_reducers_part_in_any_order_of_joining():
    early = made((2, 1), links((0, 0), (1, 0), (0, 1), (0, 2)))
    late = made((2, 1), links((1, 0), (0, 2), (0, 0), (0, 1)))
    sizes = [part.end - part.start for part in cut(early, 9 * MIB, 0)]
    assert sizes == [2 * MIB, 2 * MIB, 2 * MIB, 3 * MIB]
    assert [part.end - part.start for part in cut(late, 9 * MIB, 0)] == sizes
    two = made((2, 1), links((1, 0), (0, 1), (0, 0)))
    assert [part.link for part in cut(two, 9 * MIB, 0)] == [2, 1, 0]


def test_a_new_link_makes_new_plans():
    among = links((0, 0), (1, 0))
    plan = made((1, 1), among[:1])
    assert [part.link for part in cut(plan, MIB, 0)] == [0]
    plan.use(among, {0: 1, 1: 1})
    assert [part.link for part in cut(plan, MIB, number(1))] == [1, 0]  # begins elsewhere


def test_only_reducers_that_are_used_get_anything():
    among = links((0, 0), (1, 0), (2, 0), (1, 1))
    plan = made((1, 1, 1), among)
    assert {part.link for part in cut(plan, 9 * MIB, 0)} == {0, 1, 2, 3}
    plan.use(among, {0: 2, 1: 2})
    assert sorted(part.link for part in cut(plan, 8 * MIB, 1)) == [0, 1, 3]
    plan.use(among, {0: 1, 1: 1})
    assert sorted(part.link for part in cut(plan, 8 * MIB, 1)) == [0, 1]
    plan.use(among, {2: 1})
    assert cut(plan, MIB, 2) == [(2, 0, MIB)]
    plan.use(among, {0: 1, 1: 2, 2: 1})
    assert {part.link for part in cut(plan, 9 * MIB, 3)} == {0, 1, 2, 3}


def test_few_plans_are_kept(monkeypatch):
    monkeypatch.setattr(shard_map, "_KEPT_PLANS", 3)
    plan = made((1,), links((0, 0)))
    for sequence, nbytes in enumerate((1, 2, 3, 4, 1, 2)):
        assert cut(plan, nbytes, sequence) == [(0, 0, nbytes)]
        assert len(plan.known) <= 3


def test_what_a_reducer_owns_beside_the_largest_owner():
    pool, rank, none = links((0, 0), (1, 0), (2, 0))
    plan = made((6, 2, 0), [pool, rank, none])
    assert [plan.share(link) for link in (pool, rank, none)] == [1.0, 1 / 3, 0.0]
    assert {part.link for part in cut(plan, MIB, 0)} == {0, 1}
