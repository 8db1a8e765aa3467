"""Which reducers are in use, and who takes over the chunks of those that are lost."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.wire.messages import LAST_STAGE
from worker_client.protocol.shard_map import ShardMap, Stage

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


@given(losses=LOSSES, other=st.randoms(use_true_random=False))
def test_ranks_with_the_same_losses_choose_the_same_heirs(losses, other):
    mine = without(*losses)
    other.shuffle(losses)
    theirs = without(*losses)
    for reducer in range(5):
        assert heirs(mine, reducer) == heirs(theirs, reducer)


@given(losses=LOSSES)
def test_an_heir_is_in_use(losses):
    made = without(*losses)
    for reducer in losses:
        expected = set(range(5)) - set(losses) or {None}
        assert set(heirs(made, reducer)) <= expected
        assert [made.uses(at) for at in range(5)] == [at not in losses for at in range(5)]


@pytest.mark.parametrize("reducers", [2, 3, 5, 8])
def test_chunks_are_spread_evenly_over_the_heirs(reducers):
    for lost in range(reducers):
        shares = Counter(heirs(without(lost, reducers=reducers), lost, 10 * (reducers - 1)))
        assert shares == dict.fromkeys(set(range(reducers)) - {lost}, 10)


def test_neighbours_get_different_heirs():
    found = heirs(without(2), 2)
    assert all(one != other for one, other in pairwise(found))


@given(losses=LOSSES.filter(len), second=st.integers(0, 4))
def test_a_second_loss_moves_the_chunks_of_that_one_alone(losses, second):
    before = heirs(without(*losses), losses[0])
    made = without(*losses)
    made.lose(second, Stage(0))
    after = heirs(made, losses[0])
    assert all(old in (new, second) for old, new in zip(before, after, strict=True))


def test_a_loss_is_news_once():
    made = without(1)
    assert made.knows(1, Stage(0))
    assert made.lost() == {1: Stage(0)}
    assert not made.knows(1, Stage(3))
    made.lose(1, Stage(3))
    assert made.lost() == {1: Stage(3)}
    made.lose(1, Stage(2))
    assert made.lost() == {1: Stage(3)}, "a stale one changes nothing"
    assert made.knows(1, Stage(2))
    assert not made.knows(0, Stage(0))


def test_a_loss_that_is_heard_late_says_nothing_of_the_epoch_that_is_there_now():
    made = ShardMap(3)
    made.agree([True] * 3)
    made.lose(1, Stage(0))
    assert made.is_past(1, Stage(0))
    assert made.uses(1)
    assert not made.uses(1, 0)
    assert made.lost() == {}


def test_a_reducer_that_all_can_use_again_serves_what_begins_from_then_on():
    made = without(1, reducers=3)
    made.agree([True, False, True])
    assert (made.epoch, made.base) == (1, (0, 2))
    assert not made.uses(1)
    made.agree([True, True, True])
    assert (made.epoch, made.base) == (2, (0, 1, 2))
    assert made.uses(1)
    assert made.lost() == {}
    assert not made.uses(1, 0), "what is still in progress does not go back"
    assert set(heirs(made, 1)) == {0, 2}
    assert made.is_past(1, Stage(0))
    assert made.is_past(1, Stage(1))
    assert not made.is_past(1, Stage(2))


def test_chunks_of_an_old_epoch_are_no_longer_anybodys_if_all_of_it_are_lost():
    made = ShardMap(3)
    made.agree([True, True, False])
    made.lose(0, Stage(1))
    made.lose(1, Stage(1))
    assert made.heir(0, 0, 1) is None
    assert made.heir(0, 0, 0) == 2
    assert made.heir(2, 0, 1) is None, "it was not used in that epoch"
    assert made.heir(0, 0, 7) is None, "nobody knows that epoch"


def test_what_no_rank_can_use_leaves_things_as_they_were():
    made = ShardMap(2)
    made.agree([False, False])
    assert (made.epoch, made.base) == (1, (0, 1))


def test_a_hosted_reducer_is_used_whatever_a_rank_says():
    made = ShardMap(3, hosted={2: 0})
    made.agree([True, False, False])
    assert made.base == (0, 2)


def test_beginning_anew_uses_all_from_then_on():
    made = without(0, 1, 2, reducers=3)
    assert not any(made.uses(reducer) for reducer in range(3))
    made.renew(2)
    assert (made.epoch, made.base, made.lost()) == (2, (0, 1, 2), {})
    assert all(made.uses(reducer) for reducer in range(3))
    assert heirs(made, 0, 4) == [None] * 4, "what was begun before has nobody"


def test_old_epochs_are_forgotten():
    made = ShardMap(2)
    for _ in range(300):
        made.agree([True, True])
    made.lose(0, Stage(300))
    assert made.heir(0, 0, 300) == made.heir(0, 0, 100) == 1
    assert made.heir(0, 0, 0) is None


def test_when_all_are_lost_the_first_that_is_there_takes_all():
    made = adopting(0, 1)
    assert made.stage() == Stage(0)
    assert made.adopted is None
    made.lose(2, Stage(0))
    assert made.stage() == Stage(0, 1)
    assert made.adopted == 0
    assert {*heirs(made, 0), *heirs(made, 1), *heirs(made, 2)} == {0}
    made.lose(0, Stage(0, 1))
    assert made.used() == [1, 2]
    assert {*heirs(made, 0), *heirs(made, 1), *heirs(made, 2)} == {1}
    assert not made.intact


def test_one_that_was_not_in_use_takes_the_place_of_all():
    made = adopting(2)
    made.agree([True, True, False])
    for reducer in (0, 1):
        made.lose(reducer, Stage(1))
    assert made.used() == [0, 1, 2]
    for reducer in (0, 1):
        made.lose(reducer, Stage(1, 1))
    assert made.adopted == 2
    assert made.heir(0, 5, 1) == 2


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


def test_what_was_begun_earlier_goes_on_in_a_later_stage():
    made = adopting(0)
    made.agree([False, True, True])
    for reducer in (1, 2):  # lost for what was begun in epoch 0 as well
        made.lose(reducer, Stage(1))
    assert made.stage(0) == Stage(0, 1), "reducer 0 was not lost since"
    assert made.heir(1, 0, 0) == made.heir(1, 0, 1) == 0
    made.lose(0, Stage(1, 1))
    assert made.heir(1, 0, 0) == made.heir(1, 0, 1) == 1


def test_a_loss_of_a_rank_that_waits_for_the_answer_after_the_next_is_not_the_end():
    made = adopting(0, 1, 2)
    for reducer in range(3):
        made.lose(reducer, Stage(2))
    assert made.stage() == Stage(2, 1)
    assert made.adopted == 0


def test_after_the_last_stage_all_are_lost():
    made = adopting(0, 1, 2)
    for reducer in range(3):
        made.lose(reducer, made.final)
    assert made.stage() is None
    assert made.used() == []
    assert made.heir(0, 0, 0) is None
    assert made.fresh() == 3


def test_a_hosted_reducer_takes_no_others_place():
    made = ShardMap(3, hosted={2: 0}, adopts=True)
    made.lose(0, Stage(0))
    made.lose(1, Stage(0))
    assert made.adopted is None
    assert made.used() == [2]
