"""Calls of several all-reduces, calls that a rank refuses, and what came before each."""

import pytest

from reducer.errors import (
    LocalProtocolError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
)
from reducer.wire.constants import PLACES, DType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.messages import decode_error
from tests.engine.driven import M, error, errors, join, joined, operation, result, sent
from tests.engine.network import connected
from tests.engine.words import number
from worker_client.protocol._flight import Call
from worker_client.protocol.failover import ADOPT_S
from worker_client.protocol.flight import Finish, Send
from worker_client.protocol.lifecycle import FIRST_PLACE, GRACE_S
from worker_client.protocol.operation import refused

REFUSAL = refused(1, "TypeError: not that")
LOST = RankLostError("gone", rank=0)


def part(call=None, nbytes=64, **others):
    return operation(nbytes, call=call, **others)


def refusal(call=None):
    """What a rank submits that cannot make a call, or go on with it."""
    return operation(0, name=None, call=call, refusal=REFUSAL)


def aborts(actions):
    """Numbers that are given up and why, by link."""
    found = {}
    for action in actions:
        header = Header.unpack(action.header) if isinstance(action, Send) else None
        if header is not None and header.type is M.ABORT:
            assert header.nbytes == 0
            why = type(decode_error(action.payload, header.sequence))
            found.setdefault(action.link, []).append((header.sequence, why))
    return found


def ended(actions):
    return [action.operation for action in actions if isinstance(action, Finish)]


def ask(session, mine):
    """Submit an operation of one chunk, and return what is said of it."""
    ((_, header),) = sent(session.submit(mine, 0.0), M.CONTRIBUTION)
    return header


def past(header):
    return header.since, header.history


def test_a_refused_operation_uses_up_its_number_and_every_reducer_hears_why(session):
    mine = refusal()
    actions = session.submit(mine, 0.0)
    assert ended(actions) == [mine]
    (failure,) = errors(actions)
    assert (type(failure), failure.field, failure.rank) == (MismatchError, "call", 1)
    assert str(failure) == str(REFUSAL)
    assert failure.sequence == 0
    assert aborts(actions) == {link: [(number(0), MismatchError)] for link in range(2)}
    assert sent(actions, M.CONTRIBUTION) == []
    assert session.active == 0
    assert ask(session, part()).sequence == session.watermark == number(1)


def test_a_refusal_waits_for_the_answer_to_a_question(session):
    for _ in range(2):
        session.submit(refusal(), 0.0)
    asked = session.submit(refusal(), 0.0)
    assert errors(asked) == []
    ((link, question),) = sent(asked)
    assert (question.type, question.sequence) == (M.CONTRIBUTION, number(2, place=0))
    behind = part()
    session.submit(behind, 0.0)
    assert (behind.since, behind.history) == (3, 0), "the refused call is left out for it already"
    actions = result(session, link, question)
    assert [str(failure) for failure in errors(actions)] == [str(REFUSAL)]
    assert aborts(actions) == {link: [(number(2), MismatchError)] for link in range(2)}


def test_a_reducer_that_is_away_is_told_later_of_a_refusal(lone):
    lone.disconnected(0, "died")
    (failure,) = errors(lone.submit(refusal(), 0.0))
    assert str(failure) == str(REFUSAL)
    assert aborts(join(lone, 0)) == {0: [(number(0), MismatchError)]}


def test_a_rank_that_was_stopped_hears_that_it_was_the_one(lone):
    lone.submit(part(), 0.0)
    (failure,) = errors(lone.disconnected(0, "ended the connection", 5.0))
    assert isinstance(failure, RankLostError)
    assert failure.rank == lone.spec.rank
    assert "this process, did not run for 5.0 s" in str(failure)
    assert "set REDUCTION_PATIENCE" in str(failure)
    join(lone, 0)
    actions = lone.submit(part(), 1.0)
    result(lone, *sent(actions)[0])
    (failure,) = errors([*lone.submit(part(), 1.0), *lone.disconnected(0, "died")])
    assert isinstance(failure, ReducerLostError), "the next loss is another one"


def test_a_rank_that_was_stopped_and_is_served_again_hears_who_is_lost_later(lone):
    lone.disconnected(0, "ended the connection", 5.0)
    join(lone, 0)
    for _ in range(2):  # from the second one on nothing stands in the way
        result(lone, *sent(lone.submit(part(), 1.0), M.CONTRIBUTION)[0])
    ((link, mine),) = sent(lone.submit(part(), 1.0), M.CONTRIBUTION)
    (failure,) = errors(error(lone, link, LOST, mine.sequence))
    assert (failure.rank, "did not run" in str(failure)) == (0, False)


def test_a_rank_that_was_stopped_hears_it_whichever_reducer_is_the_last(session):
    session.submit(part(), 0.0)
    assert errors(session.disconnected(0, "ended the connection", 5.0)) == []
    assert errors(session.disconnected(1, "died")) == []
    assert errors(session.tick(1.0)) == []
    (failure,) = errors(session.tick(1.0 + ADOPT_S))
    assert "this process, did not run for 5.0 s" in str(failure)


def test_a_refusal_amid_a_call_ends_what_has_begun_of_it(session):
    call, other = Call(), part()
    session.submit(other, 0.0)
    parts = [part(call), part(call)]
    for one in parts:
        session.submit(one, 0.0)
    mine = refusal(call)
    actions = session.submit(mine, 0.0)
    assert {str(failure) for failure in errors(actions)} == {str(REFUSAL)}
    assert {failure.sequence for failure in errors(actions)} == {1}
    assert set(ended(actions)) == {*parts, mine}
    given_up = {(number(1, place), MismatchError) for place in (1, 2, 3)}
    told = aborts(actions)
    assert {link: set(numbers) for link, numbers in told.items()} == {0: given_up, 1: given_up}
    assert sum(map(len, told.values())) == 6
    assert session.active == 1, "the call before goes on"
    assert ask(session, part()).sequence == number(2, place=0), "the ranks agree before that call"


def test_all_reduces_of_a_call_are_numbered_within_it(lone):
    calls = [Call(), Call(), None, None]
    operations = [
        part(call) for call, count in zip(calls, (1, 3, 1, 1), strict=True) for _ in range(count)
    ]
    expected = [number(0), number(1, 1), number(1, 2), number(1, 3), number(2), number(3)]
    assert [ask(lone, one).sequence for one in operations] == expected


def test_a_question_comes_before_the_first_all_reduce_of_a_call(session):
    for _ in range(2):
        result(session, *sent(session.submit(part(), 0.0), M.CONTRIBUTION)[0])
    call = Call()
    ((link, question),) = sent(session.submit(part(call), 0.0))
    assert question.sequence == number(2, place=0)
    assert session.submit(part(call), 0.0) == []
    headers = [header for _, header in sent(result(session, link, question), M.CONTRIBUTION)]
    assert sorted(header.sequence for header in headers) == [number(2, 1), number(2, 2)]


def test_a_call_has_no_more_all_reduces_than_numbers(lone):
    call = Call()
    for place in range(FIRST_PLACE, PLACES):
        assert ask(lone, part(call)).sequence == number(0, place)
    with pytest.raises(LocalProtocolError, match="at most 127"):
        lone.submit(part(call), 0.0)
    assert ask(lone, part()).sequence == number(1)


def test_if_one_all_reduce_fails_all_of_its_call_fail(session):
    call, other = Call(), part()
    session.submit(other, 0.0)
    parts = [part(call) for _ in range(3)]
    for one in parts:
        session.submit(one, 0.0)
    actions = error(session, 0, LOST, number(1, 2))
    assert set(ended(actions)) == set(parts)
    for failure in errors(actions):
        assert (type(failure), failure.rank, failure.sequence) == (RankLostError, 0, 1)
    others = {(number(1, place), RankLostError) for place in (1, 3)}
    told = {link: set(numbers) for link, numbers in aborts(actions).items()}
    assert told == {0: others, 1: others | {(number(1, 2), RankLostError)}}
    assert session.active == 1, "the call before goes on"

    late = part(call)
    actions = session.submit(late, 0.0)
    assert ended(actions) == [late]
    (failure,) = errors(actions)
    assert isinstance(failure, RankLostError)
    assert (str(failure), failure.rank, failure.sequence) == (str(LOST), 0, 1)
    assert aborts(actions) == {link: [(number(1, 4), RankLostError)] for link in range(2)}
    assert sent(actions, M.CONTRIBUTION) == []


def test_a_call_whose_first_deadline_passes_is_over(session):
    call = Call()
    for _ in range(3):
        session.submit(part(call), 0.0)
    session.tick(10.0)
    assert session.tick(10.0 + GRACE_S - 0.01) == []
    actions = session.tick(10.0 + GRACE_S)
    assert [type(failure) for failure in errors(actions)] == [ReductionTimeout] * 3
    assert session.active == 0
    (failure,) = errors(session.submit(part(call), 11.0))
    assert isinstance(failure, ReductionTimeout)


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 32},
        {"dtype": DType.INT8},
        {"op": ReduceOp.MAX},
        {"name": "another"},
        {"name": None},
        {"count": 2},
        {"count": 3},
    ],
)
def test_whatever_differs_in_a_call_shows_in_later_ones(change):
    def later(count=1, **fields):
        session, call = joined(1, 2, ("a:1",), 1 << 20, 64), Call()
        for _ in range(count):
            ask(session, part(call, **fields))
        return [past(ask(session, part())) for _ in range(3)]

    assert later() == later()
    assert all(one != other for one, other in zip(later(), later(**change), strict=True))


def test_after_a_failure_calls_are_compared_by_what_follows_it(lone):
    for _ in range(3):
        ask(lone, part())
    error(lone, 0, LOST, number(1))
    first, second, third = (past(ask(lone, part())) for _ in range(3))
    assert first == (3, 0)
    assert second[0] == third[0] == 3
    assert len({first, second, third}) == 3
    lone.submit(refusal(), 0.0)
    assert past(ask(lone, part())) == (7, 0)


def test_a_failure_amid_a_call_leaves_out_all_of_that_call():
    """Ranks may hear of it at different places; what they say later is the same."""

    def later(place):
        session = joined(1, 2, ("a:1",), 1 << 20, 64)
        ask(session, part())
        call, said = Call(), []
        for at in (1, 2, 3):
            said.append(past(ask(session, part(call))))
            if at == place:
                assert len(errors(error(session, 0, LOST, number(0)))) == 1
        assert all(since == 0 for since, _ in said[:place])
        assert said[place:] == [(2, 0)] * (3 - place)
        return [past(ask(session, part())) for _ in range(3)]

    assert later(1) == later(2) == later(3)
    assert [since for since, _ in later(1)] == [2] * 3
    assert later(1)[0] == (2, 0)
    assert len(set(later(1))) == 3


@pytest.fixture
def network(implementation):
    """Two ranks and two reducers."""
    return connected(2, 2, 64, 0, implementation)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("calls", [1, 5])
def test_a_call_that_one_rank_refuses_fails_at_the_other_which_hears_why(network, first, calls):
    for _ in range(calls):
        for rank in (first, 1 - first):
            network.submit(rank, refusal() if rank == 1 else part())
        network.deliver_all()
    for rank in range(2):
        network.submit(rank, part())
    network.deliver_all()
    for worker in network.workers:
        failures = [worker.ended[call] for call in range(calls)]
        assert {str(failure) for failure in failures} == {str(REFUSAL)}
        assert [failure.sequence for failure in failures] == list(range(calls))
        assert worker.ended[calls] is None
