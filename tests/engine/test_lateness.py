"""How long the others wait for each rank: the tally, its oracle, and what an engine says."""

import json
import logging
import random
import statistics
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.engine import _slots
from reducer.engine.engine import PING_INTERVAL_S
from reducer.engine.lateness import (
    SPAN_S,
    Cause,
    Span,
    Watch,
    chance,
    costliest,
    straggler,
)
from reducer.errors import RemoteProtocolError
from reducer.wire.header import Header
from reducer.wire.messages import Straggler, Stragglers, decode, encode
from tests.engine.words import M
from tests.twins import slots
from tests.twins.lateness import Lateness

MS = 1000
LOOK_S, LOOKS = 0.5, 10  # between looks: so many in a step at most
STRAGGLER = 1
# Who contributes to which of some all-reduces, and how long after the one before; or a turn.
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 40 * MS)),
    max_size=60,
)


def everything(lateness, world_size):
    ranks = range(world_size)
    return [
        [lateness.all(span, cause) for span in Span for cause in Cause],
        [lateness.waits(rank, span, cause) for rank in ranks for span in Span for cause in Cause],
        lateness.us(lately=False),
        lateness.us(lately=True),
        costliest(lateness, 2),
    ]


@given(st.integers(1, 4), STEPS)
def test_both_count_alike(world_size, steps):
    twins = [module.Rounds(world_size) for module in (slots, _slots)]
    for twin in twins:
        twin.keep_times()
    assert twins[0].used() == twins[1].used() == 0
    now_us, placed = 5 * MS, set()
    for rank, sequence, chunk, later_us in steps:
        now_us += later_us
        if rank >= world_size:
            for twin in twins:
                twin.lateness.turn()
            continue
        if (rank, sequence, chunk) in placed:
            continue
        placed.add((rank, sequence, chunk))
        header = Header(
            M.CONTRIBUTION, sequence=sequence, offset=8 * chunk, nbytes=8, total_bytes=32, rank=rank
        )
        for twin in twins:
            twin.now_us = now_us
            found = twin.get(sequence) or twin.open(sequence, header)
            if found.place(header, bytes(8)).missing == 0:
                found.finish(8 * chunk, world_size)
        plain, compiled = (everything(twin.lateness, world_size) for twin in twins)
        assert plain == compiled
    assert twins[0].used() == twins[1].used()
    times = []
    for twin in twins:
        while twin.oldest is not None:
            twin.discard_oldest()
        times.append(twin.take_times())
    assert times[0] == times[1]
    assert twins[0].traffic() == twins[1].traffic()
    assert [one.sequence for one in times[0]] == sorted({sequence for _, sequence, _ in placed})
    assert all(one.begun_us <= one.alone_us <= one.complete_us for one in times[0] if one.chunks)


class Line:
    """What a reducer hears of one job."""

    def __init__(self, world_size):
        self.lateness = Lateness(world_size)
        self._world_size = world_size
        self._heard = {}

    def hear(self, ms, rank, sequence, chunk=0):
        """Take a contribution; they come in the order of time."""
        heard = self._heard.setdefault((sequence, chunk), [])
        heard.append(round(1e6 + ms * MS))
        alone_us = heard[-2] if len(heard) == self._world_size else 0
        self.lateness.record(rank, sequence, heard[-1], alone_us)

    def told(self):
        """For how many ms the others have waited for each rank, late and slow."""
        for rank in range(self._world_size):  # much later, all waits are over
            self.lateness.record(rank, -1, 1 << 60, 1 << 60)
        found = costliest(self.lateness, self._world_size)
        return {one.rank: (one.late.us / MS, one.slow.us / MS) for one in found}


def test_the_last_is_charged_with_what_it_alone_has_cost():
    line = Line(3)
    for rank, ms in ((0, 0), (2, 10), (1, 50)):
        line.hear(ms, rank, 0)
    assert line.told() == {1: (40.0, 0.0)}


def test_who_begins_late_is_late_though_several_buffers_wait_for_it():
    """Each rank computes a buffer in 5 ms, and rank 1 begins 100 ms later."""
    line = Line(3)
    events = [(5 * k + (100 if rank == 1 else 0), rank, k) for k in range(10) for rank in range(3)]
    for ms, rank, k in sorted(events):
        line.hear(ms, rank, k)
    assert line.told() == {1: (100.0, 0.0)}


def test_who_is_early_is_not_charged_when_its_window_is_full():
    """Four chunks, of which two may be in flight; rank 1 begins 100 ms later."""
    line = Line(2)
    for ms, rank, chunk in (
        *((0, 0, 0), (1, 0, 1), (100, 1, 0), (101, 0, 2), (101, 1, 1)),
        *((102, 0, 3), (102, 1, 2), (103, 1, 3)),
    ):
        line.hear(ms, rank, 0, chunk)
    assert line.told() == {1: (100.0, 0.0)}


def test_who_falls_behind_in_the_middle_of_a_buffer_is_slow():
    """A chunk takes 10 ms at rank 1 and 1 ms at rank 0, which has four in flight."""
    line, done = Line(2), [10.0 * chunk for chunk in range(21)]
    events = [(done[max(0, chunk - 3)] + 1, 0, chunk) for chunk in range(20)]
    events += [(10.0 * (chunk + 1), 1, chunk) for chunk in range(20)]
    for ms, rank, chunk in sorted(events):
        line.hear(ms, rank, 0, chunk)
    assert line.told() == {1: (0.0, 39.0)}, "three chunks ahead, the others have to stop"


def test_spans_follow_each_other():
    lateness = Lateness(2)
    for number, expected in ((1, (0, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 2)), (4, (1, 1, 3))):
        lateness.record(1, number, 1000 * number * MS + 3 * MS, 1000 * number * MS)
        found = tuple(lateness.waits(1, span, Cause.LATE).number for span in Span)
        assert found == expected, "a wait counts when it is over"
        lateness.turn()


@pytest.mark.parametrize("waits", [10, 50])
@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
def test_chance_accuses_nobody(world_size, waits):
    """Not even where now and then one is late by ten times as much: on a busy machine, say."""
    rng = random.Random(world_size * waits)
    for _ in range(200):
        lateness, now_us = Lateness(world_size), 1
        for number in range(waits):
            rank, lasts_us = rng.randrange(world_size), int(rng.paretovariate(1.2) * MS)
            lateness.record(rank, number, now_us + lasts_us, now_us)
            now_us += lasts_us + 1
        assert straggler(lateness, world_size, 1e-3) is None


def late(share, varies, rng, rank):
    """Compute for a step, or be the one that is late by a share of each."""
    return 1 - share * (rank != STRAGGLER) + rng.gauss(0, varies)


def exponential(rng, _):
    return rng.expovariate(1.0)


def gaussian(rng, _):
    return max(0.01, rng.gauss(1.0, 0.2))


def looks_at(world_size, step_s, compute, seed=0, reducers=2):
    """Make steps for 10 minutes, or 400 of them; return whom reducers name at each look.

    They hear a contribution within 2 ms, and the second one begins to look 1.7 s later.
    """
    rng = random.Random(f"{world_size} {step_s} {seed}")
    known = [(Lateness(world_size), Watch()) for _ in range(reducers)]
    now = looked = begun = 100.0
    looks = []
    sequence = 0
    while now < begun + max(600.0, 400 * step_s):
        took = [max(0.0, step_s * compute(rng, rank)) for rank in range(world_size)]
        first, second = sorted(range(world_size), key=took.__getitem__)[-2:]
        ends = now + took[second]
        while looked < ends:
            looked += max(LOOK_S, step_s / LOOKS)
            for number, (lateness, watch) in enumerate(known):
                if looked - begun >= number * 1.7:
                    watch.look(lateness, world_size, looked)
            looks.append([watch.straggler for _, watch in known])
        for lateness, _ in known:
            before, after = sorted(rng.uniform(0, 0.002) for _ in range(2))
            alone_us = round(1e6 * (now + took[first] + before))
            lateness.record(first, sequence, alone_us, 0)
            last_us = max(alone_us, round(1e6 * (ends + after)))
            lateness.record(second, sequence, last_us, alone_us)
            # The other one's window was full until then: now the last chunk waits for that rank.
            lateness.record(first, sequence, last_us + rng.randrange(1, 1000), last_us)
        sequence, now = sequence + 1, ends + 0.002
    return looks


@pytest.mark.parametrize("step_s", [0.5, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_rank_that_delays_every_step_is_named(world_size, step_s):
    looks = looks_at(world_size, step_s, partial(late, 0.9, 0.01))
    named = [one for told in looks for one in told if one is not None]
    assert {one.rank for one in named} == {STRAGGLER}
    assert len(named) >= 0.95 * 2 * len(looks)
    assert all(one.median_s == pytest.approx(0.9 * step_s, rel=0.1) for one in named)
    agreed = sum((first is None) == (second is None) for first, second in looks)
    assert agreed >= 0.95 * len(looks)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_its_waits_need_not_be_of_one_length(world_size):
    looks = looks_at(world_size, 1.0, partial(late, 0.7, 0.3))
    assert sum(one is not None and one.rank == STRAGGLER for one, _ in looks) >= 0.9 * len(looks)


@pytest.mark.parametrize("compute", [exponential, gaussian])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_nobody_is_named_where_all_are_alike(world_size, compute):
    for seed in range(20):
        looks = looks_at(world_size, 2.0, compute, seed, reducers=1)
        assert not any(one for (one,) in looks), seed


def test_it_is_named_until_the_others_do_not_wait_for_it():
    """Steps of 10 s are longer than a look takes, and there is a pause of a minute in them."""
    lateness, watch, told = Lateness(2), Watch(), []
    for at in range(0, 3000, 5):
        if at % 10 == 0 and not 1000 <= at < 1060:
            late_us, now_us = (9_000_000 if at < 2000 else 1), (100 + at) * 1_000_000
            lateness.record(1, at, now_us, now_us - late_us)
        watch.look(lateness, 2, 100.0 + at)
        told.append(watch.straggler is not None)
    first = told.index(True)
    assert 5 * first <= 190
    assert all(told[first:200])
    assert all(told[250:400]), "after the pause, too"
    assert not any(told[480:])


@given(st.lists(st.floats(3, 7.6), min_size=1, max_size=31))
def test_medians_are_right_to_a_tenth(powers):
    lateness, lasted_us = Lateness(2), [int(10**power) for power in powers]
    for at, us in enumerate([*lasted_us, 1]):  # the last one goes on
        lateness.record(1, at, (at + 1) * 10**9, (at + 1) * 10**9 - us)
    found_s = lateness.waits(1, Span.NOW, Cause.LATE).median_s(0)
    low, high = statistics.median_low(lasted_us), statistics.median_high(lasted_us)
    assert 0.9 * low / 1e6 <= found_s <= 1.1 * high / 1e6


@pytest.mark.parametrize(
    ("median_s", "says"),
    [(0.0004, "under 1 ms"), (0.00116, "about 1.2 ms"), (0.0996, "about 0.10 s"), (43.2, "43 s")],
)
def test_how_long_is_said_in_two_digits(median_s, says):
    assert f"{says} each: it comes late" in str(Straggler(1, "late", 0.5, median_s))


@pytest.mark.parametrize(
    ("least", "of", "share", "expected"),
    [(3, 3, 0.5, 1 / 8), (2, 7, 0.3, 1.0), (2, 3, 0.25, 10 / 64), (1, 40, 0.02, 1 - 0.98**40)],
)
def test_what_chance_brings(least, of, share, expected):
    assert chance(least, of, share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("late", "others", "seconds", "says"),
    [
        ((91, 30), (5, 30), 10.0, "rank 3 for 27% of the time, about 29 ms each: it comes"),
        ((50, 30), (40, 30), 10.0, None),  # for another one nearly as long
        ((90, 1.5), (5, 1.5), 10.0, None),  # it costs next to nothing
        ((7, 30), (0, 1), 1.0, None),  # too few
        ((3, 3000), (90, 5), 10.0, None),  # pauses
        ((12, 300), (50, 5), 10.0, "rank 3 for 36% of the time, about 0.28 s each"),
        ((12, 300, 20, 1), (0, 1), 10.0, "rank 3 for 36% of the time, about 0.28 s each"),
    ],
)
def test_whom_the_others_wait_for(late, others, seconds, says):
    lateness, now_us = Lateness(4), 1
    for rank, waits in ((3, late), (1, others)):
        lasted_ms = [
            ms for at in range(0, len(waits), 2) for ms in [waits[at + 1]] * int(waits[at])
        ]
        for at, ms in enumerate([*lasted_ms, 0.001]):  # the last one goes on
            lasts_us = round(ms * MS)
            lateness.record(rank, at + 1000 * rank, now_us + lasts_us, now_us)
            now_us += lasts_us + 1
    found = straggler(lateness, 4, seconds)
    assert (found is None) if says is None else says in str(found)


def test_an_engine_names_it_once_until_it_is_over(reducer, caplog):
    caplog.set_level(logging.INFO)
    sequence = 0

    def make(rounds, late_s):
        nonlocal sequence
        for _ in range(rounds):
            for rank in range(2):
                reducer.contribute(rank, sequence, watermark=sequence, at=reducer.now)
                reducer.now += late_s if rank == 0 else 0.1
            sequence += 2
        reducer.tick()

    def said():
        return [one.message for one in caplog.records if "wait for rank 1" in one.message]

    def pinged():
        reducer.now += PING_INTERVAL_S
        sends = [send for send in reducer.engine.tick(reducer.now) if send.payload]
        return [decode(Stragglers, send.payload).straggler for send in sends]

    reducer.now = 100.0
    reducer.tick()
    for _ in range(3):
        make(int(SPAN_S / 0.13) + 1, 0.03)
    (line,) = said()
    assert line.startswith("job 'job': the others wait for rank 1 for 2")
    assert line.endswith("% of the time, about 29 ms each: it comes late")
    (job,) = reducer.engine.jobs
    assert job.watch.straggler is not None
    assert pinged() == [job.watch.straggler] * 2
    for _ in range(3):
        make(int(SPAN_S / 0.1) + 1, 0.0)
    assert job.watch.straggler is None
    assert said()[1:] == []
    assert pinged() == []


def ping(told):
    return Header(M.PING).pack(), b"" if told is None else encode(Stragglers((), told))


def test_a_worker_knows_whom_its_reducers_name(session):
    seldom, often = (Straggler(rank, "late", share, 0.04) for rank, share in ((1, 0.7), (0, 0.9)))
    assert session.session.straggler is None
    session.receive(0, *ping(seldom))
    assert session.session.straggler == seldom
    session.receive(1, *ping(often))
    assert session.session.straggler == often
    session.receive(1, *ping(None))
    assert session.session.straggler == seldom
    session.session.disconnected(0, "was cut")
    assert session.session.straggler is None


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((0.5, 0.45), None),
        ((0.5, None), None),  # nobody knows yet, or ever, how long that one waits for the other
        ((0.5, 0.2), 1),
        ((0.2, 0.5), 0),
    ],
)
@pytest.mark.parametrize("hosts", [{0: 0, 1: 1}, {1: 1}, {}])
def test_of_two_ranks_that_host_reducers_neither_is_called_slow_whose_links_are_alike(
    session, shares, named, hosts
):
    """Each of the two reducers waits for the other's rank; a pool's knows better."""
    core = session.session
    core.spec = replace(core.spec, hosts=hosts)
    for at, share in enumerate(shares):
        if share is not None:
            session.receive(at, *ping(Straggler(1 - at, "slow", share, 0.04)))
    between = named is None and len(hosts) == 2
    why = "the link between them is slow" if between else "its link is slow"
    assert str(core.straggler).endswith(f": {why}")
    assert core.straggler.rank == (1 if named is None else named)
    session.receive(0, *ping(Straggler(1, "late", 0.9, 0.04)))
    session.receive(1, *ping(None))
    assert str(core.straggler).endswith(": it comes late")


def test_a_worker_adds_up_how_long_ranks_were_waited_for(session):
    asked = session.session
    late, slow = Straggler(1, "late", 0.5, 0.1), Straggler(0, "slow", 0.2, 0.1)
    for told, since_s in ((late, 11.0), (slow, 14.0)):
        asked.tick(since_s)
        session.receive(0, *ping(told))
        for tenths in range(1, 21):
            asked.tick(since_s + tenths / 10)
        session.receive(0, *ping(None))
    # Between two looks; the process may have stood still where they are more than a second apart.
    assert asked.waited_for_s == pytest.approx({1: 1.0, 0: 0.4})
    asked.tick(20.0)
    session.receive(0, *ping(late))
    asked.tick(60.0)
    assert asked.waited_for_s == pytest.approx({1: 1.5, 0: 0.4})


@pytest.mark.parametrize(
    "wrong",
    [{"rank": "1"}, {"cause": ["late"]}, {"share": -0.1}, {"median_s": float("nan")}],
)
def test_a_straggler_that_is_none(wrong):
    right = {"rank": 1, "cause": "late", "share": 0.5, "median_s": 0.1}
    told = {"missing": [], "straggler": right | {"what a later version adds": 1}}
    assert decode(Stragglers, json.dumps(told).encode()).straggler == Straggler(1, "late", 0.5, 0.1)
    told["straggler"] = right | wrong
    with pytest.raises(RemoteProtocolError):
        decode(Stragglers, json.dumps(told).encode())
    told["straggler"] = [1]
    with pytest.raises(RemoteProtocolError, match="must be an object"):
        decode(Stragglers, json.dumps(told).encode())


def test_a_rank_that_the_job_does_not_have_is_no_straggler(session):
    session.receive(0, *ping(Straggler(2, "late", 0.5, 0.1)))
    assert session.session.straggler is None
    assert not session.session.links[0].member, "who says so is no reducer"
