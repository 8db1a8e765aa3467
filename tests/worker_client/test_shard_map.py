"""Which reducers are in use, who takes over the chunks of lost ones, and which link has what."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reducer.wire.constants import MAX_LANES, DType, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import LAST_STAGE
from tests.engine.words import number
from tests.worker_client.transcripts import play, scenarios
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.link import Link
from worker_client.protocol.shard_map import ShardMap, ShardPlan, Stage

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


@given(losses=LOSSES.filter(len), second=st.integers(0, 4), other=st.permutations(range(5)))
def test_an_heir_is_in_use(losses, second, other):
    made, theirs = without(*losses), without(*sorted(losses, key=other.index))
    assert [made.uses(at) for at in range(5)] == [at not in losses for at in range(5)]
    for reducer in range(5):
        found = heirs(made, reducer)
        assert found == heirs(theirs, reducer), "whichever was lost first"
        if reducer in losses:
            assert set(found) <= (set(range(5)) - set(losses) or {None})
    before = heirs(made, losses[0])
    made.lose(second, Stage(0))
    pairs = zip(before, heirs(made, losses[0]), strict=True)
    assert all(old in (new, second) for old, new in pairs), "those of the second alone move"


@pytest.mark.parametrize("reducers", [2, 3, 5, 8])
def test_neighbours_are_spread_over_all_heirs(reducers):
    for lost in range(reducers):
        others = sorted({*range(reducers)} - {lost})
        found = heirs(without(lost, reducers=reducers), lost)
        assert all(sorted(found[at:][: len(others)]) == others for at in range(50))


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
    flight = CompiledFlight(Header(MessageType.HELLO))
    plan = ShardPlan(weights, chunk_bytes, lambda nbytes, parts: 7 * nbytes + parts, flight)
    plan.use(among, dict.fromkeys(range(len(weights)), MAX_LANES))
    return plan


def cut(plan, nbytes, sequence):
    parts, _ = plan.cut(nbytes, sequence, DType.INT8)
    return parts


@given(
    reducers=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    chunk_bytes=st.sampled_from([0, 64, 64 * KIB]),
)
def test_links_that_take_part_have_their_reducers_shares(reducers, order, chunk_bytes):
    weights, lanes = zip(*reducers, strict=True)
    taking = {at: order.randint(1, 3) for at in range(len(weights)) if order.randint(0, 3)}
    owners = [
        (at, lane)
        for at in range(len(weights))
        for lane in range(min(lanes[at], taking.get(at, 0)))
        if weights[at]
    ]
    assume(owners)
    places = [(at, lane) for at in range(len(weights)) for lane in range(lanes[at])]
    order.shuffle(places)  # of joining
    kept = made(weights, links(*places), chunk_bytes)
    cut(kept, 9 * MIB, number(0))
    kept.use(links(*places), taking)
    counts = Counter(at for at, _ in owners)
    whole = sum(weights[at] for at in counts)
    for call in (0, 1, 2, 0):
        parts = cut(kept, 9 * MIB, number(call))
        turn = call % len(owners)
        assert [places[part.link] for part in parts] == owners[turn:] + owners[:turn]
        assert [0, *(part.end for part in parts)] == [*(part.start for part in parts), 9 * MIB]
        for part in parts:
            reducer, _ = places[part.link]
            share = 9 * MIB * weights[reducer] / whole / counts[reducer]
            assert part.end - part.start == pytest.approx(share, abs=64)
        for nbytes, dtype in ((0, DType.INT8), (MIB + 1, DType.INT8), (MIB + 1, DType.BLOCK8)):
            fresh = made(weights, [], chunk_bytes)
            fresh.use(links(*places), taking)
            sequence = number(call, FIRST_PLACE + 1)
            again = kept.cut(nbytes, sequence, dtype)
            assert again == fresh.cut(nbytes, sequence, dtype)
            assert again[1] == 7 * nbytes + len(again[0])  # as `made` says


def test_calls_and_the_all_reduces_of_each_begin_in_turn_at_every_reducer():
    plan = made((1, 1, 1), links((0, 0), (1, 0), (2, 0)))
    numbers = [number(call, place) for call in range(3) for place in (1, 2, 3)]
    first = [cut(plan, 9 * MIB, sequence)[0].link for sequence in numbers]
    assert first == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_what_a_reducer_owns_beside_the_largest_owner():
    pool, rank, none = links((0, 0), (1, 0), (2, 0))
    plan = made((6, 2, 0), [pool, rank, none])
    assert [plan.share(link) for link in (pool, rank, none)] == [1.0, 1 / 3, 0.0]
    assert {part.link for part in cut(plan, MIB, 0)} == {0, 1}
