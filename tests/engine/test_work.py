"""What a message costs a reducer while many all-reduces are in progress: counted, not timed."""

import sys

import pytest

from reducer.errors import ReducerLostError
from reducer.wire.constants import NO_SEQUENCE
from reducer.wire.messages import encode_error
from tests.engine.transcripts import transcripts
from tests.engine.words import M, kinds, number, with_ranks

FEW, MANY = 20, 400
CALLED_OFF = encode_error(ReducerLostError("gone", reducer="x"))


def work(act):
    """Return how many instructions of Python something takes."""
    counted = 0

    def count(frame, event, argument):
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


def grows_little(cost):
    """Say whether it costs about the same with few rounds and with many."""
    return cost(MANY) < cost(FEW) + (MANY - FEW) / 2


def with_open(implementation, rounds):
    """A job of 3 ranks, of which one never comes and one has begun some all-reduces."""
    reducer = with_ranks(implementation, 2, world_size=3, window=1 << 20)
    for call in range(rounds):
        reducer.contribute(0, number(call))
    return reducer


@pytest.mark.parametrize("passed", [0, 1])  # a call is begun, or one is finished as well
def test_a_message_costs_the_same_however_many_rounds_are_open(implementation, passed):
    def cost(rounds):
        reducer = with_open(implementation, rounds)
        return work(lambda: reducer.contribute(0, number(rounds), watermark=passed * number(1)))

    assert grows_little(cost)


@pytest.mark.parametrize("failed", [False, True])
def test_what_one_watermark_frees_is_all_that_it_costs(implementation, *, failed):
    def cost(rounds):
        reducer = with_ranks(implementation, 2, window=1 << 20)
        for call in range(rounds):
            if failed:
                reducer.say(0, M.ABORT, number(call), CALLED_OFF)
            else:
                reducer.contribute(0, number(call))
        reducer.contribute_both(number(rounds))
        reducer.contribute(0, number(rounds + 1), watermark=number(2))
        instructions = work(lambda: reducer.contribute(1, number(rounds + 1), watermark=number(2)))
        assert len(reducer.rounds()) == rounds
        return instructions

    assert grows_little(cost)


def test_rounds_are_forgotten_in_any_order_of_opening(implementation):
    reducer = with_ranks(implementation, 2, window=1 << 20)
    calls = [call * 37 % 101 for call in range(101)]
    for call in calls:
        reducer.contribute_both(number(call))
    for passed in (1, 2, 50, 90, 101):
        reducer.contribute_both(number(200 + passed), watermark=number(passed))
        left = {number(call) for call in calls if call >= passed}
        assert {each for each in reducer.rounds() if each < number(150)} == left


test_limits = transcripts("""
A job has so many rounds and no more
    ranks 2 max_rounds=1500 window=16<<20
    0 CONTRIBUTION range(number(0),number(1500),PLACES)
    0 CONTRIBUTION number(1500) -> 0 CapacityError limit=max_rounds says=--max-rounds
    held 1500*1024
    counters over_limit=1
    1 CONTRIBUTION number(0) -> 0 1 RESULT      # what is there goes on
    0 CONTRIBUTION number(1) watermark=number(1)
    1 CONTRIBUTION number(1) watermark=number(1) -> 0 1 RESULT
    0 CONTRIBUTION number(1500)

The rounds of a key's jobs count together
    new max_rounds=100
    allow key-1=* key-2=*
    0@one HELLO key=key-1 job=one -> one WELCOME
    0@two HELLO key=key-1 job=two -> two WELCOME
    0@three HELLO key=key-2 job=three -> three WELCOME
    0@one CONTRIBUTION range(number(0),number(60),PLACES) job="fingerprint('one')"
    0@two CONTRIBUTION range(number(0),number(40),PLACES) job="fingerprint('two')"
    each who: one | two
    0@$who CONTRIBUTION number(70) job="fingerprint('$who')" -> $who CapacityError limit=max_rounds
    0@three CONTRIBUTION range(number(0),number(100),PLACES) job="fingerprint('three')"

A key has so many connections and no more
    new max_connections_per_key=3
    allow key-1=* key-2=*
    0@a0 HELLO key=key-1 job=a -> a0 WELCOME
    1@a1 HELLO key=key-1 job=a -> a1 WELCOME
    0@b0 HELLO key=key-1 job=b -> b0 WELCOME
    1@b1 HELLO key=key-1 job=b -> b1 CapacityError limit=max_connections_per_key
        says=--max-connections-per-key
    counters over_limit=1
    0@c0 HELLO key=key-2 job=c -> c0 WELCOME    # the others have their own
    1@c1 HELLO key=key-2 job=c -> c1 WELCOME
    0@later HELLO key=key-1 job=a generation=1  # members of the earlier one make room
        -> a0 a1 StaleGenerationError, later WELCOME
    lose b0
    1@b1 HELLO key=key-1 job=b -> b1 WELCOME
    jobs a=1 b=1 c=2
""")


def go(reducer, rank):
    reducer.say(rank, M.GOODBYE, NO_SEQUENCE)


def come_and_go(reducer, rank):
    assert M.WELCOME in kinds(reducer.hello(rank, world_size=3, window=1 << 20))
    go(reducer, rank)


def refuse(reducer):
    """The rank that is missing comes with other settings: all that is in progress ends."""
    sends = reducer.hello(2, world_size=3, chunk_bytes=4096, peer=b"other")
    assert {M.ERROR} == set(kinds(sends))


@pytest.mark.parametrize(("rank", "failed"), [(1, False), (1, True), (2, True)])
def test_who_leaves_costs_no_more_the_more_rounds_it_leaves_alone(implementation, rank, *, failed):
    """Rank 1 has contributed to all rounds, which wait for rank 2, or have failed without it."""

    def cost(rounds):
        reducer = with_open(implementation, rounds)
        for call in range(rounds):
            reducer.contribute(1, number(call))
        if failed:
            come_and_go(reducer, 2)
        go(reducer, 1)
        assert reducer.engine.counters.rounds_failed == (rounds if failed else 0)
        return work(lambda: come_and_go(reducer, rank))

    assert grows_little(cost)


def test_a_range_that_is_given_up_again_costs_no_more(implementation):
    def cost(rounds):
        reducer = with_open(implementation, rounds)
        far = number(2 * rounds)
        reducer.say(0, M.ABORT, far, CALLED_OFF, nbytes=1)

        def extend():
            for more in range(1, 10):
                reducer.say(0, M.ABORT, far + more, CALLED_OFF, nbytes=1)

        instructions = work(extend)
        assert reducer.engine.counters.rounds_failed == 0
        reducer.say(0, M.ABORT, number(0), CALLED_OFF, nbytes=far)
        assert reducer.engine.counters.rounds_failed == rounds
        return instructions

    assert grows_little(cost)


def test_ranks_of_other_settings_cost_no_more_the_more_has_failed(implementation):
    def cost(rounds):
        reducer = with_open(implementation, rounds)
        refuse(reducer)
        assert reducer.engine.counters.rounds_failed == rounds
        return work(lambda: (come_and_go(reducer, 2), refuse(reducer)))

    assert grows_little(cost)
