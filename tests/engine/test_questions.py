"""The ranks' own question before a call: who asks it, who has gone on, and what becomes of it."""

import math

import pytest

from tests.engine.transcripts import transcripts
from tests.engine.words import number
from worker_client.protocol.agreement import EVERY, OFTEN_S, Agreement

test_what_is_declined = transcripts("""
A question that a rank of its epoch does not ask is declined
    0 CONTRIBUTION number(4,0) epoch=3
    1 CONTRIBUTION number(4) epoch=3 -> 0 MismatchError field=question rank=0 other_rank=1
    0 CONTRIBUTION number(4) epoch=3 -> 0 1 RESULT     # and the call goes on

A question that comes after a call of its epoch is declined
    1 CONTRIBUTION number(4) epoch=3
    0 CONTRIBUTION number(4,0) epoch=3 -> 0 MismatchError field=question rank=0 other_rank=1
    0 CONTRIBUTION number(4) epoch=3 -> 0 1 RESULT

Ranks of other epochs have lost touch
    each epoch: 2 | 5
    0 CONTRIBUTION number(4,0) epoch=3
    1 CONTRIBUTION number(4) epoch=$epoch -> 0 MismatchError field=epoch expected=3 got=$epoch

Ranks of other epochs have lost touch, the one without the answer first
    each epoch: 2 | 5
    1 CONTRIBUTION number(4) epoch=$epoch
    0 CONTRIBUTION number(4,0) epoch=3 -> 0 MismatchError field=epoch expected=3 got=$epoch

A rank that has the answer has not passed the question
    1 CONTRIBUTION number(4) epoch=4 watermark=number(4,0)
    0 CONTRIBUTION number(4,0) epoch=3          # rank 1 will claim the answer
    1 RETAINED number(4,0) epoch=3 -> 1 RETAINED

A call that a rank gives up without the question declines it
    0 CONTRIBUTION number(4,0) epoch=3
    1 ABORT number(4) REFUSED epoch=3
        -> 0 MismatchError field=question, 1 MismatchError field=call
    0 CONTRIBUTION number(4) epoch=3 -> 0 MismatchError field=call

A question about a call that was given up is declined
    1 ABORT number(4) REFUSED epoch=3 -> 1 MismatchError field=call
    0 CONTRIBUTION number(4,0) epoch=3 -> 0 MismatchError field=question
    0 CONTRIBUTION number(4) epoch=3 -> 0 MismatchError field=call

All that ask are answered
    0 CONTRIBUTION number(4,0)
    1 CONTRIBUTION number(4,0) -> 0 1 RESULT
""")


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
