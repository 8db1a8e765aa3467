"""What a message costs a reducer while many all-reduces are in progress: counted, not timed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from reducer.engine.limits import Limits
from reducer.errors import CapacityError, ReducerLostError
from reducer.wire.constants import NO_SEQUENCE
from reducer.wire.messages import encode_error
from tests.engine.test_keys import AllowList, hello
from tests.engine.words import M, Reducer, kinds, number, told

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

FEW, MANY = 20, 400
CALLED_OFF = encode_error(ReducerLostError("gone", reducer="x"))


def work(act: Callable[[], object]) -> int:
    """Return how many instructions of Python something takes."""
    counted = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        del argument
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
    return counted


def with_open(implementation: str, rounds: int) -> Reducer:
    """A job of 3 ranks, of which one never comes and one has begun some all-reduces."""
    reducer = Reducer(implementation)
    for rank in (0, 1):
        reducer.hello(rank, world_size=3, window=1 << 20)
    for call in range(rounds):
        reducer.contribute(0, number(call))
    return reducer


def advance(reducer: Reducer, rounds: int) -> int:
    """Have a rank finish one call and begin another."""
    return work(lambda: reducer.contribute(0, number(rounds), watermark=number(1)))


def begin(reducer: Reducer, rounds: int) -> int:
    """Have a rank begin a call."""
    return work(lambda: reducer.contribute(0, number(rounds)))


@pytest.mark.parametrize("act", [advance, begin])
def test_a_message_costs_the_same_however_many_rounds_are_open(
    implementation: str, act: Callable[[Reducer, int], int]
) -> None:
    few, many = (act(with_open(implementation, rounds), rounds) for rounds in (FEW, MANY))
    assert many < few + (MANY - FEW) / 2


@pytest.mark.parametrize("failed", [False, True])
def test_what_one_watermark_frees_is_all_that_it_costs(
    implementation: str, *, failed: bool
) -> None:
    reducers = [Reducer(implementation) for _ in range(2)]
    costs = []
    for reducer, rounds in zip(reducers, (FEW, MANY), strict=True):
        for rank in range(2):
            reducer.hello(rank, window=1 << 20)
        for call in range(rounds):
            if failed:
                reducer.say(0, M.ABORT, number(call), CALLED_OFF)
            else:
                reducer.contribute(0, number(call))
        for rank in range(2):
            reducer.contribute(rank, number(rounds))
        reducer.contribute(0, number(rounds + 1), watermark=number(2))

        def free(reducer: Reducer = reducer, rounds: int = rounds) -> None:
            reducer.contribute(1, number(rounds + 1), watermark=number(2))

        costs.append(work(free))
        assert len(reducer.rounds()) == rounds
    assert costs[1] < costs[0] + (MANY - FEW) / 2


def test_rounds_are_forgotten_in_any_order_of_opening(implementation: str) -> None:
    reducer = Reducer(implementation)
    for rank in range(2):
        reducer.hello(rank, window=1 << 20)
    calls = [call * 37 % 101 for call in range(101)]
    for call in calls:
        for rank in range(2):
            reducer.contribute(rank, number(call))
    for passed in (1, 2, 50, 90, 101):
        for rank in range(2):
            reducer.contribute(rank, number(200 + passed), watermark=number(passed))
        left = {number(call) for call in calls if call >= passed}
        assert {each for each in reducer.rounds() if each < number(150)} == left


def test_a_job_has_so_many_rounds_and_no_more(implementation: str) -> None:
    reducer = Reducer(implementation, limits=Limits(max_rounds=1500))
    for rank in range(2):
        reducer.hello(rank, window=16 << 20)
    for call in range(1500):
        assert reducer.contribute(0, number(call)) == []
    error = told(reducer.contribute(0, number(1500)))[b"0"]
    assert isinstance(error, CapacityError)
    assert (error.limit, "--max-rounds" in str(error)) == ("max_rounds", True)
    assert len(reducer.rounds()) == 1500
    assert kinds(reducer.contribute(1, number(0))) == [M.RESULT] * 2, "what is there goes on"
    assert reducer.engine.counters.over_limit == 1
    for rank in range(2):
        reducer.contribute(rank, number(1), watermark=number(1))
    assert reducer.contribute(0, number(1500)) == []


def test_the_rounds_of_a_keys_jobs_count_together(implementation: str) -> None:
    reducer = Reducer(implementation, limits=Limits(max_rounds=100))
    reducer.engine.allow(AllowList({name: frozenset({"*"}) for name in ("key-1", "key-2")}))
    for name, key in (("one", "key-1"), ("two", "key-1"), ("three", "key-2")):
        assert kinds(hello(reducer, 0, key, name, peer=name.encode())) == [M.WELCOME]
    one, two, three = reducer.engine.jobs

    def begin(job: Any, call: int) -> list:
        (member,) = job.members.values()
        return reducer.contribute(0, number(call), job=job.key, payload=bytes(64), peer=member.peer)

    for call in range(60):
        assert begin(one, call) == []
    for call in range(40):
        assert begin(two, call) == []
    for job in (one, two):
        (error,) = told(begin(job, 70)).values()
        assert error.limit == "max_rounds"
    for call in range(100):
        assert begin(three, call) == [], "another key has its own"


def test_a_key_has_so_many_connections_and_no_more(implementation: str) -> None:
    reducer = Reducer(implementation, limits=Limits(max_connections_per_key=3))
    reducer.engine.allow(AllowList({name: frozenset({"*"}) for name in ("key-1", "key-2")}))

    def join(rank: int, key: str, job: str, **change: Any) -> list:
        return hello(reducer, rank, key, job, peer=f"{key}/{job}/{rank}".encode(), **change)

    for rank, job in ((0, "a"), (1, "a"), (0, "b")):
        assert kinds(join(rank, "key-1", job))[-1] is M.WELCOME
    (error,) = told(join(1, "key-1", "b")).values()
    assert isinstance(error, CapacityError)
    assert (error.limit, "--max-connections-per-key" in str(error)) == (
        "max_connections_per_key",
        True,
    )
    assert reducer.engine.counters.over_limit == 1
    for rank in range(2):
        assert kinds(join(rank, "key-2", "c")) == [M.WELCOME], "the others have their own"
    later = hello(reducer, 0, "key-1", "a", peer=b"later", generation=1)
    assert kinds(later)[0] is M.WELCOME, "the members of the earlier generation make room"
    reducer.lose(b"key-1/b/0")
    assert kinds(join(1, "key-1", "b")) == [M.WELCOME]
    assert {job.name: len(job.members) for job in reducer.engine.jobs} == {"a": 1, "c": 2, "b": 1}


# -- what comes and goes --------------------------------------------------------------------------


def go(reducer: Reducer, rank: int) -> None:
    reducer.say(rank, M.GOODBYE, NO_SEQUENCE)


def come_and_go(reducer: Reducer, rank: int) -> None:
    assert M.WELCOME in kinds(reducer.hello(rank, world_size=3, window=1 << 20))
    go(reducer, rank)


def refuse(reducer: Reducer) -> None:
    """The rank that is missing comes with other settings: all that is in progress ends."""
    sends = reducer.hello(2, world_size=3, chunk_bytes=4096, peer=b"other")
    assert {M.ERROR} == set(kinds(sends))


def bar_anew(reducer: Reducer) -> None:
    """It comes as it should, goes, and comes with other settings again."""
    come_and_go(reducer, 2)
    refuse(reducer)


@pytest.mark.parametrize(("rank", "failed"), [(1, False), (1, True), (2, True)])
def test_who_leaves_costs_no_more_the_more_rounds_it_leaves_alone(
    implementation: str, rank: int, *, failed: bool
) -> None:
    """Rank 1 has contributed to all rounds, which wait for rank 2, or have failed without it."""
    costs = []
    for rounds in (FEW, MANY):
        reducer = with_open(implementation, rounds)
        for call in range(rounds):
            reducer.contribute(1, number(call))
        if failed:
            come_and_go(reducer, 2)
        go(reducer, 1)
        assert reducer.engine.counters.rounds_failed == (rounds if failed else 0)
        costs.append(work(lambda reducer=reducer: come_and_go(reducer, rank)))
    assert costs[1] < costs[0] + (MANY - FEW) / 2


def test_a_range_that_is_given_up_again_costs_no_more(implementation: str) -> None:
    costs = []
    for rounds in (FEW, MANY):
        reducer = with_open(implementation, rounds)
        far = number(2 * rounds)
        reducer.say(0, M.ABORT, far, CALLED_OFF, nbytes=1)

        def extend(reducer: Reducer = reducer, far: int = far) -> None:
            for more in range(1, 10):
                reducer.say(0, M.ABORT, far + more, CALLED_OFF, nbytes=1)

        costs.append(work(extend))
        assert reducer.engine.counters.rounds_failed == 0
        reducer.say(0, M.ABORT, number(0), CALLED_OFF, nbytes=far)
        assert reducer.engine.counters.rounds_failed == rounds
    assert costs[1] < costs[0] + (MANY - FEW) / 2


def test_ranks_of_other_settings_cost_no_more_the_more_has_failed(implementation: str) -> None:
    costs = []
    for rounds in (FEW, MANY):
        reducer = with_open(implementation, rounds)
        refuse(reducer)
        assert reducer.engine.counters.rounds_failed == rounds
        costs.append(work(lambda reducer=reducer: bar_anew(reducer)))
    assert costs[1] < costs[0] + (MANY - FEW) / 2
