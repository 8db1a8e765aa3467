"""Runs, and processes of one run, that share a job's name."""

import pytest

from reducer.errors import RankLostError, StaleGenerationError
from reducer.wire.constants import NO_SEQUENCE
from tests.engine.words import M, Reducer, kinds, number, told


@pytest.fixture
def begun(implementation):
    """Both ranks of the run ``one`` are here, and wait for each other's contributions."""
    reducer = Reducer(implementation)
    for rank in range(2):
        assert kinds(reducer.hello(rank, run="one", process=f"process {rank}"))[0] is M.WELCOME
        reducer.contribute(rank, number(rank))
    return reducer


def test_ranks_of_two_runs_do_not_meet(implementation):
    reducer = Reducer(implementation)
    reducer.hello(0, run="one", process="a")
    error = told(reducer.hello(1, run="two", process="b", peer=b"b"))[b"b"]
    assert isinstance(error, StaleGenerationError)
    assert "still has ranks 0 of another run" in str(error)
    assert kinds(reducer.hello(1, run="one", process="c")) == [M.WELCOME]


def test_a_run_is_what_ranks_have_said_of_it(implementation):
    reducer = Reducer(implementation)
    reducer.hello(0, run="one", process="a")
    assert kinds(reducer.hello(1, run="", process="b")) == [M.WELCOME]


@pytest.mark.parametrize("away", [1, 2])
def test_a_run_ends_an_earlier_one_that_is_away_as_a_whole(begun, away):
    for rank in range(away):
        begun.engine.unreachable(b"%d" % rank)
    # Its watermark would do, and it does not say which process it is.
    sends = begun.hello(0, run="two", process="", peer=b"new", watermark=1000)
    if away < 2:
        assert isinstance(told(sends)[b"new"], StaleGenerationError)
        assert begun.rounds() == {number(0), number(1)}
    else:
        assert [send.peer for send in sends if kinds([send]) == [M.WELCOME]] == [b"new"]
        assert begun.rounds() == set()


@pytest.mark.parametrize("process", ["process 1", "another"])
def test_a_new_process_does_not_come_back_as_an_old_one(begun, process):
    begun.engine.unreachable(b"1")
    errors = told(begun.hello(1, run="one", process=process, peer=b"new", watermark=0))
    if process == "another":
        assert isinstance(errors[b"new"], StaleGenerationError), "rank 0 of its life is still here"
        assert isinstance(errors[b"0"], RankLostError), "at once"
    else:
        assert errors == {}


@pytest.mark.parametrize("last", ["farewell", "loss"])
def test_a_rank_that_was_given_up_learns_that_the_others_have_left_meanwhile(begun, last):
    give_up, leave = (lambda: begun.lose(b"1")), (lambda: begun.say(0, M.GOODBYE, NO_SEQUENCE))
    for event in (give_up, leave) if last == "farewell" else (leave, give_up):
        event()
    assert begun.engine.jobs == []
    for _ in range(2):  # also if it is given up once more
        assert kinds(begun.hello(1, run="one", process="process 1")) == [M.WELCOME]
        (error,) = told(begun.contribute(1, number(7))).values()
        assert isinstance(error, RankLostError)
        assert str(error) == "rank 0 left the job"
        begun.lose(b"1")


@pytest.mark.parametrize(
    ("generation", "process", "farewell"),
    [(0, "another", True), (1, "process 1", True), (0, "process 1", False)],
)
def test_who_left_an_earlier_life_of_a_job_is_waited_for(begun, generation, process, farewell):
    begun.lose(b"1")
    begun.say(0, M.GOODBYE, NO_SEQUENCE) if farewell else begun.lose(b"0")
    assert begun.engine.jobs == []
    begun.hello(1, run="one", process=process, generation=generation)
    assert begun.contribute(1, number(7), generation=generation) == []


def test_a_rank_that_came_back_after_its_farewell_has_not_left_for_good(begun):
    begun.say(1, M.GOODBYE, NO_SEQUENCE)
    assert kinds(begun.hello(1, run="one", process="process 1")) == [M.WELCOME]
    begun.lose(b"1")
    begun.lose(b"0")
    assert begun.engine.jobs == []
    begun.hello(0, run="one", process="process 0")
    assert begun.contribute(0, number(7)) == []
