"""Which reducers are in use, who takes over the chunks of lost ones, and which link has what."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.constants import MAX_LANES, DType
from reducer.wire.layout import shards
from reducer.wire.messages import LAST_STAGE
from tests.engine.words import number
from tests.worker_client.transcripts import play, scenarios
from worker_client.protocol import shard_map
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.link import Link
from worker_client.protocol.shard_map import Plan, ShardMap, Stage

KIB, MIB = 1 << 10, 1 << 20
LOSSES = st.lists(st.integers(0, 4), max_size=5, unique=True)


def without(*lost, reducers=5, adopts=False):
    """A map of reducers of which some are lost; perhaps it goes on with others then."""
    made = ShardMap(reducers, adopts=adopts)
    for reducer in lost:
        made.lose(reducer, Stage(0))
    return made


def adopting(*lost):
    return without(*lost, reducers=3, adopts=True)


def heirs(made, reducer, chunks=60, epoch=0):
    return [made.heir(reducer, number, epoch) for number in range(chunks)]


@given(losses=LOSSES, other=st.randoms(use_true_random=False))
def test_ranks_with_the_same_losses_choose_the_same_heirs(losses, other):
    mine = without(*losses)
    other.shuffle(losses)
    theirs = without(*losses)
    for reducer in range(5):
        assert heirs(mine, reducer) == heirs(theirs, reducer)


@given(losses=LOSSES)
def test_an_heir_is_in_use(losses):
    made = without(*losses)
    for reducer in losses:
        expected = set(range(5)) - set(losses) or {None}
        assert set(heirs(made, reducer)) <= expected
        assert [made.uses(at) for at in range(5)] == [at not in losses for at in range(5)]


@pytest.mark.parametrize("reducers", [2, 3, 5, 8])
def test_chunks_are_spread_evenly_over_the_heirs(reducers):
    for lost in range(reducers):
        shares = Counter(heirs(without(lost, reducers=reducers), lost, 10 * (reducers - 1)))
        assert shares == dict.fromkeys(set(range(reducers)) - {lost}, 10)


def test_neighbours_get_different_heirs():
    found = heirs(without(2), 2)
    assert all(one != other for one, other in pairwise(found))


@given(losses=LOSSES.filter(len), second=st.integers(0, 4))
def test_a_second_loss_moves_the_chunks_of_that_one_alone(losses, second):
    before = heirs(without(*losses), losses[0])
    made = without(*losses)
    made.lose(second, Stage(0))
    after = heirs(made, losses[0])
    assert all(old in (new, second) for old, new in zip(before, after, strict=True))


def stage(text):
    """Read EPOCH.NUMBER."""
    return Stage(*map(int, text.split(".")))


class Script:
    """A map of a transcript."""

    def map(self, reducers, *how):
        hosted = {2: 0} if "hosted" in how else ()
        self.made = ShardMap(int(reducers), hosted, adopts="adopts" in how)
        self.reducers = range(int(reducers))

    def lose(self, reducer, when):
        self.made.lose(int(reducer), self.made.final if when == "final" else stage(when))

    def agree(self, *usable):
        self.made.agree([one == "1" for one in usable])

    def renew(self, epoch):
        self.made.renew(int(epoch))

    def knows(self, reducer, when):
        return self.made.knows(int(reducer), stage(when))

    def past(self, reducer, when):
        return self.made.is_past(int(reducer), stage(when))

    def uses(self, reducer, *epoch):
        return self.made.uses(int(reducer), *map(int, epoch))

    def heirs(self, reducer, epoch):
        return heirs(self.made, int(reducer), 6, int(epoch))

    def stage(self, *epoch):
        found = self.made.stage(*map(int, epoch))
        return "none" if found is None else "{}.{}".format(*found)

    def intact(self):
        return self.made.intact

    def fresh(self):
        return self.made.fresh()

    def state(self):
        made = self.made
        lost = [f"{reducer}@{when.epoch}.{when.number}" for reducer, when in made.lost().items()]
        assert made.used() == [reducer for reducer in self.reducers if made.uses(reducer)]
        return (
            f"stage {self.stage()}: of {made.base} uses {made.used()}, lost {lost}"
            f"{'' if made.adopted is None else f', {made.adopted} adopts'}"
        )


SCENARIOS = scenarios("shard_map.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_transcripts(scenario):
    assert list(play(Script(), SCENARIOS[scenario]))


def test_old_epochs_are_forgotten():
    made = ShardMap(2)
    for _ in range(300):
        made.agree([True, True])
    made.lose(0, Stage(300))
    assert made.heir(0, 0, 300) == made.heir(0, 0, 100) == 1
    assert made.heir(0, 0, 0) is None


@given(losses=st.lists(st.tuples(st.integers(0, 2), st.integers(0, LAST_STAGE)), max_size=12))
def test_the_stage_follows_from_what_is_lost_in_any_order(losses):
    mine, theirs = adopting(), adopting()
    for reducer, stage in losses:
        mine.lose(reducer, Stage(0, stage))
    for reducer, stage in reversed(losses):
        theirs.lose(reducer, Stage(0, stage))
    assert mine.stage() == theirs.stage()
    assert mine.used() == theirs.used()
    assert all(not mine.knows(reducer, mine.stage()) for reducer in mine.used())


# -- plans: which link carries what -------------------------------------------------------------


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
