"""The ranks' own question before a call: who asks it, who has gone on, and what becomes of it."""

import math

import numpy as np
import pytest

from reducer.errors import MismatchError
from reducer.wire.header import Header
from reducer.wire.messages import decode_error, encode_error
from tests.engine.words import M, kinds, number, told
from worker_client.protocol.agreement import EVERY, OFTEN_S, Agreement
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.operation import refused

QUESTION, CALL = number(4, 0), number(4)


# What a reducer hears first.
in_either_order = pytest.mark.parametrize("turn", [1, -1], ids=["question", "call"])


@in_either_order
def test_a_question_that_a_rank_of_its_epoch_does_not_ask_is_declined(reducer, turn):
    sends = []
    for rank, sequence in [(0, QUESTION), (1, CALL)][::turn]:
        sends += reducer.contribute(rank, sequence, epoch=3)
    (declined,) = told(sends).values()
    assert isinstance(declined, MismatchError)
    assert (declined.field, declined.rank, declined.other_rank) == ("question", 0, 1)
    done = reducer.contribute(0, CALL, epoch=3)
    assert [kind.name for kind in kinds(done)] == ["RESULT", "RESULT"], "and the call goes on"


@in_either_order
@pytest.mark.parametrize("epoch", [2, 5])
def test_ranks_of_other_epochs_have_lost_touch(reducer, turn, epoch):
    sends = []
    for rank, sequence, here in [(0, QUESTION, 3), (1, CALL, epoch)][::turn]:
        sends += reducer.contribute(rank, sequence, epoch=here)
    error = told(sends)[b"0"]
    assert isinstance(error, MismatchError)
    assert (error.field, {error.expected, error.got}) == ("epoch", {3, epoch})


def test_a_rank_that_has_the_answer_has_not_passed_the_question(reducer):
    reducer.contribute(1, CALL, epoch=4, watermark=QUESTION)
    assert reducer.contribute(0, QUESTION, epoch=3) == [], "rank 1 will claim the answer"
    assert told(reducer.retain(1, QUESTION, epoch=3)) == {}


@in_either_order
def test_a_call_that_a_rank_gives_up_without_the_question_declines_it(reducer, turn):
    why = encode_error(refused(1, "it is odd"))
    says = [
        lambda: reducer.contribute(0, QUESTION, epoch=3),
        lambda: reducer.say(1, M.ABORT, CALL, why, epoch=3),
    ]
    sends = [send for say in says[::turn] for send in say()]
    assert "question" in {error.field for error in told_all(sends)}
    assert told(reducer.contribute(0, CALL, epoch=3))[b"0"].field == "call"


def told_all(sends):
    """Errors that rank 0 is told."""
    headers = [(send, Header.unpack(send.header)) for send in sends if send.peer == b"0"]
    return [
        decode_error(send.payload, header.sequence)
        for send, header in headers
        if header.type is M.ERROR
    ]


def test_all_that_ask_are_answered(reducer):
    reducer.contribute(0, QUESTION)
    assert len(reducer.contribute(1, QUESTION)) == 2


@pytest.mark.parametrize(
    ("between_s", "often"), [(10.0, 1), (0.5, 1), (0.15, 2), (0.01, 32), (1e-6, 64)]
)
@pytest.mark.parametrize("untold", [0, 9])
def test_how_often_a_rank_asks_that_could_use_one_more(between_s, often, untold):
    agreement = Agreement(needed=True, fixed=0, reducers=2)
    agreement.wanted = True
    now = 100.0
    for step in range(1, 51):
        now += between_s * (1 + untold)
        agreement.called(step * (1 + untold), now)
    calls = range(EVERY * 8, EVERY * 8 + 400)
    due = {call + 1 for call in calls if agreement.due(number(call))}
    assert due == {call + 1 for call in calls if (call + 1) % often == 0 or (call + 1) % EVERY == 0}
    agreement.wanted = False
    assert {call + 1 for call in calls if agreement.due(number(call))} < due


@pytest.mark.parametrize("needed", [True, False])
def test_nothing_is_due_before_the_next_number_that_may_be(needed):
    agreement = Agreement(needed=needed, fixed=0, reducers=2)
    due = [call for call in range(EVERY * 6) if agreement.due(number(call))]
    assert bool(due) is needed
    for call in range(EVERY * 5):
        following = agreement.next_due(number(call))
        assert following > number(call)
        assert following <= min((number(at) for at in due if at > call), default=math.inf)
        if needed and call > EVERY:
            assert following == number(next(at for at in due if at > call), 0)


def test_a_pause_makes_a_rank_ask_at_once():
    agreement = Agreement(needed=True, fixed=0, reducers=2)
    agreement.wanted = True
    for step in range(1000):
        agreement.called(step, step * 1e-3)
    assert not agreement.due(number(1000))
    agreement.called(1000, 1.0 + 2 * OFTEN_S)
    assert agreement.due(number(1000))


def test_places_of_a_call():
    assert (number(0, 0), number(0), FIRST_PLACE) == (0, 1, 1)
    assert np.diff([number(call) for call in range(5)]).tolist() == [128] * 4
