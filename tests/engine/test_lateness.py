"""How long the others wait for each rank: the tally, its compiled twin, and what an engine says."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.engine import _slots, slots
from reducer.engine.engine import PING_INTERVAL_S
from reducer.engine.lateness import (
    BUCKETS,
    SPAN_S,
    Cause,
    Lateness,
    RankWaits,
    Span,
    Waits,
    ranked,
    straggler,
)
from reducer.errors import RemoteProtocolError
from reducer.wire.header import Header
from reducer.wire.messages import Straggler, Stragglers, decode, encode
from tests.engine.driven import joined
from tests.engine.words import M

if TYPE_CHECKING:
    from tests.engine.driven import Driven
    from tests.engine.words import Reducer

MS = 1000
TIME = st.integers(0, 1 << 22)
ARRIVAL = st.tuples(TIME, TIME, TIME).map(
    lambda one: (one[0], one[0] + one[1], min(one[0], one[2])) if one[0] else (0, 0, 0)
)
TURN = None
HISTORIES = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.lists(ARRIVAL, min_size=n, max_size=n) | st.just(TURN), max_size=30)
    )
)


def everything(lateness: Lateness, world_size: int) -> list[object]:
    ranks = range(world_size)
    return [
        [lateness.rounds(span) for span in Span],
        [lateness.waits(rank, span, cause) for rank in ranks for span in Span for cause in Cause],
        lateness.costliest(2),
    ]


@given(HISTORIES)
def test_both_count_alike(history: tuple[int, list[list[tuple[int, int, int]] | None]]) -> None:
    world_size, steps = history
    twins = [module.Rounds(world_size).lateness for module in (slots, _slots)]
    rounds = [module.Rounds(world_size) for module in (slots, _slots)]
    twins = [one.lateness for one in rounds]
    for step in steps:
        for twin in twins:
            if step is TURN:
                twin.turn()
            else:
                twin.take(step)
        plain, compiled = (everything(twin, world_size) for twin in twins)
        assert plain == compiled
    assert rounds[0].taken() == rounds[1].taken()


def test_the_last_is_charged_with_what_it_alone_has_cost() -> None:
    lateness = Lateness(3)
    # Rank 1 comes 40 ms after the next one, and rank 2 takes 10 ms longer than the next one.
    lateness.take([(1, 5 * MS, 0), (41 * MS, 42 * MS, 0), (1 * MS, 16 * MS, 0)])
    late = lateness.waits(1, Span.EVER, Cause.LATE)
    slow = lateness.waits(2, Span.EVER, Cause.SLOW)
    assert (late.us, late.rounds) == (40 * MS, 1)
    assert late.buckets.index(1) == 6  # 32 to 64 ms
    assert 0.032 < late.median_s < 0.064
    assert (slow.us, slow.rounds) == (10 * MS + 1, 1)
    others = [(rank, cause) for rank in range(3) for cause in Cause]
    others = [one for one in others if one not in {(1, Cause.LATE), (2, Cause.SLOW)}]
    assert all(lateness.waits(rank, Span.EVER, cause) == Waits() for rank, cause in others)


@pytest.mark.parametrize(
    ("before", "cause"), [(0, Cause.LATE), (15 * MS, Cause.LATE), (30 * MS, Cause.SLOW)]
)
def test_what_queues_behind_another_buffer_is_slow(before: int, cause: Cause) -> None:
    lateness = Lateness(2)
    lateness.take([(1, 1, 0), (40 * MS, 40 * MS, before)])
    assert lateness.waits(1, Span.EVER, cause).rounds == 1


def test_spans_follow_each_other() -> None:
    lateness = Lateness(2)
    late = [(1, 1, 0), (3 * MS, 3 * MS, 0)]
    for expected in ((1, 0, 1), (1, 1, 2), (1, 1, 3)):
        lateness.take(late)
        assert tuple(lateness.waits(1, span, Cause.LATE).rounds for span in Span) == expected
        lateness.turn()


@pytest.mark.parametrize("world_size", [2, 3, 8, 100])
def test_chance_accuses_nobody(world_size: int) -> None:
    rng = random.Random(world_size)
    for _ in range(20):
        lateness = Lateness(world_size)
        for _ in range(50):
            firsts = [1 + int(rng.expovariate(1 / (5 * MS))) for _ in range(world_size)]
            lateness.take([(at, at + int(rng.expovariate(1 / (5 * MS))), 0) for at in firsts])
        assert straggler(ranked(lateness, 8), 50, world_size, 50 * 0.02) is None


def waits(rounds: int, bucket: int) -> Waits:
    return Waits(0, tuple(rounds * (at == bucket) for at in range(BUCKETS)))


@pytest.mark.parametrize(
    ("late", "slow", "rounds", "says"),
    [
        (waits(91, 5), waits(5, 5), 100, "rank 3 was last in 91% of rounds, by 23 ms in the med"),
        (waits(70, 2), waits(70, 6), 100, "by 45 ms in the median: its link is slow"),
        (waits(50, 5), waits(50, 5), 100, None),  # as often for the one reason as for the other
        (waits(90, 1), Waits(), 100, None),  # it costs next to nothing
        (waits(7, 6), Waits(), 7, None),  # of too few
        (waits(3, 12), Waits(), 100, None),  # pauses
        (waits(6, 9), waits(50, 1), 100, "rank 3 was last in 6% of rounds, by 362 ms in the med"),
    ],
)
def test_whom_the_others_wait_for(late: Waits, slow: Waits, rounds: int, says: str | None) -> None:
    found = straggler([RankWaits(3, (late, slow), (late, slow))], rounds, 4, 5.0)
    assert (found is None) if says is None else says in str(found)


def test_an_engine_names_it_once_and_says_when_it_is_over(
    reducer: Reducer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sequence = 0

    def make(rounds: int, late_s: float) -> None:
        nonlocal sequence
        for _ in range(rounds):
            for rank in range(2):
                reducer.contribute(rank, sequence, watermark=sequence, at=reducer.now)
                reducer.now += late_s if rank == 0 else 0.1
            sequence += 2
        reducer.tick()

    def said() -> list[str]:
        return [one.message for one in caplog.records if "rank 1" in one.message]

    def pinged() -> list[Straggler | None]:
        reducer.now += PING_INTERVAL_S
        sends = [send for send in reducer.engine.tick(reducer.now) if send.payload]
        return [decode(Stragglers, send.payload).straggler for send in sends]

    reducer.now = 100.0
    reducer.tick()
    for _ in range(3):
        make(int(SPAN_S / 0.13) + 1, 0.03)
    (line,) = said()
    assert "job 'job': rank 1 was last in 100% of rounds, by 23 ms in the median: it came" in line
    (job,) = reducer.engine.jobs
    assert job.straggler is not None
    assert pinged() == [job.straggler] * 2
    for _ in range(3):
        make(int(SPAN_S / 0.1) + 1, 0.0)
    assert said()[1:] == ["job 'job': the others wait for rank 1 no more"]
    assert job.straggler is None
    assert pinged() == []


def ping(told: Straggler | None) -> tuple[bytes, bytes]:
    return Header(M.PING).pack(), b"" if told is None else encode(Stragglers((), told))


def test_a_worker_knows_whom_its_reducers_name(session: Driven) -> None:
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


def test_rank_0_says_it_when_it_changes(
    implementation: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = joined(implementation, 0, 2, ("a:1",), 1 << 20, 64)
    told = Straggler(1, "slow", 0.9, 0.042)
    for one in (told, replace(told, share=0.8), None, None):
        session.receive(0, *ping(one))
    (line,) = [record.message for record in caplog.records]
    assert line == "rank 1 was last in 90% of rounds, by 42 ms in the median: its link is slow"


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": -1},
        {"rank": "1"},
        {"cause": "lazy"},
        {"cause": ["late"]},
        {"share": -0.1},
        {"share": "all"},
        {"median_s": 1e9},
        {"median_s": float("nan")},
    ],
)
def test_a_straggler_that_is_none(wrong: dict[str, object]) -> None:
    right: dict[str, object] = {"rank": 1, "cause": "late", "share": 0.5, "median_s": 0.1}
    told = {"missing": [], "straggler": right | {"what a later version adds": 1}}
    assert decode(Stragglers, json.dumps(told).encode()).straggler == Straggler(1, "late", 0.5, 0.1)
    told["straggler"] = right | wrong
    with pytest.raises(RemoteProtocolError):
        decode(Stragglers, json.dumps(told).encode())
    told["straggler"] = [1]
    with pytest.raises(RemoteProtocolError, match="must be an object"):
        decode(Stragglers, json.dumps(told).encode())
