"""Ranks that leave in the middle of a round, and come back or come late."""

import pytest

from reducer.engine.engine import AWAY_S
from reducer.errors import MismatchError, RankLostError, ReducerLostError
from reducer.wire.constants import ReduceOp
from reducer.wire.messages import encode_error
from tests.engine.words import M, Reducer, kinds, told, two_chunks, with_ranks


def test_contributions_of_two_lives_are_not_mixed(reducer):
    two_chunks(reducer, 1, 0)
    assert reducer.engine.unreachable(b"1") == []  # nobody waits for it yet
    assert kinds(reducer.hello(1)) == [M.WELCOME]
    assert reducer.engine.held() == 0
    errors = told(two_chunks(reducer, 1, 0, 64))
    assert isinstance(errors[b"1"], RankLostError)
    errors = told(two_chunks(reducer, 0, 0))
    assert errors[b"0"].rank == 1
    assert reducer.engine.held() == 0


def test_a_rank_that_comes_back_to_a_round_that_is_done_is_told(reducer):
    reducer.contribute(1)
    reducer.contribute(0)
    reducer.engine.unreachable(b"1")
    reducer.hello(1)
    errors = told(reducer.contribute(1))
    assert errors[b"1"].rank == 1


def test_a_rank_that_comes_back_is_told_of_a_failure_again(reducer):
    body = encode_error(RankLostError("gone", rank=7))
    assert told(reducer.say(1, M.ABORT, 0, body)).keys() == {b"1"}
    reducer.engine.unreachable(b"1")
    reducer.hello(1)
    assert told(reducer.contribute(1))[b"1"].rank == 7


@pytest.mark.parametrize("watermark", [0, 1])
def test_who_waits_for_a_rank_that_came_back_without_its_rounds_is_told_when_it_goes_for_good(
    reducer, watermark
):
    two_chunks(reducer, 0, 0)
    assert kinds(two_chunks(reducer, 1, 0)) == [M.RESULT] * 2  # one chunk is done
    reducer.engine.unreachable(b"1")
    reducer.hello(1, watermark=watermark)
    # It lives, and has told the others to leave this reducer: they need not fail.
    assert told(two_chunks(reducer, 0, 64)) == {}
    reducer.engine.tick(5.0)
    assert reducer.engine.unreachable(b"1") == []
    errors = told(reducer.engine.tick(5.0 + AWAY_S))
    assert errors[b"0"].rank == 1


def test_what_a_rank_gave_before_it_came_back_is_dropped(implementation):
    reducer = with_ranks(implementation, 3)
    reducer.contribute_both()
    assert reducer.engine.unreachable(b"1") == []  # rank 2 may still complete it
    assert kinds(reducer.hello(1, world_size=3)) == [M.WELCOME]  # it tells the others, or has
    assert reducer.engine.held() == 1024  # of rank 0
    errors = told(reducer.contribute(1))
    assert errors.keys() == {b"0", b"1"}
    assert errors[b"0"].rank == 1
    assert reducer.engine.held() == 0


def test_nobody_waits_for_a_rank_that_gave_up_before_it_joined(implementation):
    reducer = Reducer(implementation)  # it was restarted
    reducer.hello(0, watermark=3)
    reducer.contribute(0, sequence=3)
    assert kinds(reducer.hello(1, watermark=4)) == [M.WELCOME]
    body = encode_error(ReducerLostError("gone", reducer="here:1"))
    errors = told(reducer.say(1, M.ABORT, 3, body, watermark=4))
    assert errors.keys() == {b"0", b"1"}
    assert isinstance(errors[b"0"], ReducerLostError)


def test_a_rank_that_joins_late_learns_why_a_round_failed(implementation):
    reducer = with_ranks(implementation, 2, world_size=3)
    reducer.contribute(0)
    reducer.contribute(1, op=ReduceOp.MAX)
    reducer.contribute_both(sequence=1, watermark=1)
    reducer.hello(2, world_size=3)
    assert isinstance(told(reducer.contribute(2))[b"2"], MismatchError)


def test_a_round_waits_for_a_rank_that_comes_back_and_had_not_taken_part(reducer):
    """Its connection broke before it knew that it had been welcomed."""
    two_chunks(reducer, 0, 0)
    reducer.engine.unreachable(b"1")
    reducer.hello(1)
    assert kinds(two_chunks(reducer, 1, 0)) == [M.RESULT] * 2
    reducer.engine.unreachable(b"1")  # and again: now it has
    reducer.hello(1)
    assert told(two_chunks(reducer, 0, 64)) == {}
    assert told(two_chunks(reducer, 1, 64))[b"0"].rank == 1
