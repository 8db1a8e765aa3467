"""Ranks find out which tensors all of them have, in rounds without a network."""

import random
from types import MappingProxyType

import numpy as np
import pytest

from reducer.wire.constants import DType, ReduceOp
from worker_client.fusion import negotiation
from worker_client.fusion.negotiation import JOIN, Decision, GivenUp, Key, Negotiation, Tensor


def key(name, dtype=DType.FLOAT32, op=ReduceOp.SUM, n=8, *, call=0, shape=""):
    return Key(Tensor(name, dtype, op, n, shape=shape), call)


def calls(count):
    return [key("a", call=call) for call in range(count)]


def tensors(*keys):
    return [key.tensor for key in keys]


class Ranks:
    """All ranks of a job; sums are exact and reach everybody that is present."""

    def __init__(self, world_size):
        self.all = [Negotiation(rank, world_size) for rank in range(world_size)]
        self.sums = 0

    def round(self, *has, absent=(), given_up=None, counts=MappingProxyType({})):
        """Make a round; every rank is told of the same, and only of what all present ranks have.

        `given_up`: which rank makes which call no more. `counts`: calls of each name.
        """
        gone = dict([given_up] if given_up else [])
        present = [rank for rank in range(len(self.all)) if rank not in absent]
        assert len({self.all[rank].state for rank in present}) == 1
        asked = [
            self.all[at].ask(has[at], [gone[at]] if at in gone else [], counts) for at in present
        ]
        self.exchange(asked, present)
        decisions = [self.all[rank].decide() for rank in present]
        assert len({tuple(decision.ready) for decision in decisions}) == 1
        return decisions

    def exchange(self, asked, present):
        """Sum up what ranks ask, and what they then announce, if they do."""
        self.add_up(asked)
        heard = [self.all[rank].hear() for rank in present]
        self.announced = [None if one is None else one.copy() for one in heard]
        if heard[0] is not None:
            self.add_up(heard)

    def add_up(self, buffers):
        self.sums += 1
        assert len({buffer.size for buffer in buffers}) == 1
        total = np.sum(buffers, axis=0, dtype=np.uint8)
        for buffer in buffers:
            buffer[:] = total


def test_what_all_have_is_ready_in_one_order():
    ranks = Ranks(3)
    a, b, c = key("a"), key("b"), key("c")
    decisions = ranks.round([a, b], [b, c, a], [c, b])
    assert [decision.ready for decision in decisions] == [tensors(b)] * 3
    assert [rank.missing_ranks(a) for rank in ranks.all] == [(2,)] * 3
    assert [rank.missing_ranks(c) for rank in ranks.all] == [(0,)] * 3


def test_a_tensor_is_announced_once():
    ranks = Ranks(2)
    assert ranks.round([key("a")], [])[0].ready == []
    assert ranks.sums == 2
    assert ranks.round([key("a")], [key("a")])[0].ready == tensors(key("a"))
    assert ranks.sums == 3, "rank 1 has heard of it"
    for a in calls(4)[1:]:
        assert ranks.round([a], [a])[0].ready == tensors(a)
    assert ranks.sums == 6


def test_shapes_are_announced_where_they_are_given_and_once():
    ranks = Ranks(2)
    a, b = key("a", shape="(2, 1)"), key("b")
    ranks.round([a, b], [a, b])
    said = b'[["a",1,1,8,false,0,"(2, 1)"],["b",1,1,8,false,0]]'
    assert said in ranks.announced[0].tobytes()
    a, b = key("a", shape="(2, 1)", call=1), key("b", call=1)
    assert ranks.round([a, b], [a, b])[0].ready == tensors(a, b)
    assert ranks.announced == [None, None], "they were announced"


def test_nothing_at_some_rank_is_no_agreement():
    ranks = Ranks(2)
    assert ranks.round([], [key("a")])[1] == Decision([], {}, {}, {})
    assert ranks.all[1].missing_ranks(key("a")) == (0,)
    assert ranks.round([], [])[0] == Decision([], {}, {}, {})


@pytest.mark.parametrize(
    ("other", "field", "expected", "got"),
    [
        (key("a", n=16), "total_bytes", 8, 16),
        (key("a", DType.INT32), "dtype", "FLOAT32", "INT32"),
        (key("a", op=ReduceOp.MAX), "op", "SUM", "MAX"),
        (key("a", shape="(2,)"), "shape", "", "(2,)"),
    ],
)
def test_ranks_that_differ_are_named(other, field, expected, got):
    ranks = Ranks(3)
    assert ranks.round([key("a")], [], [other])[0].mismatched == {}, "rank 1 may have either"
    for decision in ranks.round([key("a"), key("b")], [key("a"), key("b")], [other, key("b")]):
        error = decision.mismatched[key("a")]
        assert decision.mismatched == {key("a"): error, other: error}
        assert (error.field, error.rank, error.other_rank) == (field, 0, 2)
        assert (error.expected, error.got) == (expected, got)
        assert decision.ready == tensors(key("b"))
    again = key("a", call=1)
    assert ranks.round([again], [again], [again])[0].ready == tensors(again)


def test_after_a_failure_at_one_rank_calls_are_not_mixed_up():
    ranks = Ranks(3)
    first, second, third = calls(3)
    assert ranks.round([first], [first], [])[0].ready == []
    # The last rank's first call has failed, and it makes the second one.
    (decision, *_) = ranks.round([first], [first], [second])
    assert decision.ready == []
    assert decision.mismatched.keys() == {first}, "the second one may yet be made by all"
    error = decision.mismatched[first]
    assert (error.field, error.expected, error.got) == ("call", 0, 1)
    assert (error.rank, error.other_rank) == (0, 2)
    assert ranks.round([second], [], [second])[0].ready == []
    assert ranks.round([second], [second], [second])[0].ready == tensors(second)
    assert ranks.round([third], [third], [third])[0].ready == tensors(third)


def test_a_call_that_a_rank_gives_up_is_told_once_with_the_reason():
    ranks = Ranks(3)
    a, b = calls(2)
    for decision in ranks.round([b], [a], [a], given_up=(0, GivenUp("a", 0, "ConfigError: no"))):
        assert decision.ready == []
        assert decision.mismatched == {}, "the reason says more than the numbers of calls"
        (error,) = decision.given_up.values()
        assert list(decision.given_up) == [("a", 0)]
        assert "rank 0 takes no part in this call: ConfigError: no" in str(error)
        assert (error.field, error.rank) == ("call", 0)
    again = ranks.round([b], [b], [b])
    assert [(one.ready, one.given_up) for one in again] == [(tensors(b), {})] * 3


def test_a_rank_that_missed_what_another_gives_up_is_found():
    ranks = Ranks(2)
    ranks.all[0].ask([], [GivenUp("a", 0, "no")])
    ranks.round([], [], given_up=(0, GivenUp("a", 0, "no")))
    assert ranks.all[0].state != Negotiation(1, 2).state


def test_the_last_call_waits_for_all_others():
    ranks = Ranks(2)
    a, join = key("a"), key(JOIN)
    ranks.round([join], [a])
    assert ranks.all[0].wanted() == [a]
    assert ranks.all[1].wanted() == [join]
    assert ranks.round([join], [a, join])[0].ready == [], "rank 0 may stand in"
    assert ranks.round([join, a], [a, join])[0].ready == tensors(join, a)
    assert ranks.all[0].wanted() == []


def test_a_call_may_be_announced_before_the_one_that_precedes_it():
    ranks = Ranks(2)
    first, second, third = calls(3)
    ranks.round([], [second])
    ranks.round([first], [])
    assert ranks.round([first], [first])[0].ready == tensors(first)
    assert ranks.round([second], [second])[0].ready == tensors(second)
    assert ranks.round([third], [third])[0].ready == tensors(third)


def test_ranks_that_are_gone_are_not_waited_for():
    ranks = Ranks(3)
    ranks.round([key("a")], [], [])
    assert ranks.round([key("a")], [], [key("a")], absent=(1,))[0].ready == tensors(key("a"))


def test_a_rank_that_is_lost_in_the_midst_of_a_round_has_announced_nothing():
    ranks = Ranks(3)
    has = [[key("a")], [key("a")], [key("a"), key("b")]]
    ranks.add_up([one.ask(keys) for one, keys in zip(ranks.all, has, strict=True)])
    announced = [one.hear() for one in ranks.all]
    left = ranks.all[:2]
    ranks.add_up(announced[:2])  # the last rank is lost before this one
    for decision in [one.decide() for one in left]:
        assert decision.ready == tensors(key("a"))
    assert left[0].state == left[1].state


def test_too_many_names_are_forgotten_by_all(monkeypatch):
    monkeypatch.setattr(negotiation, "MOST_KNOWN", 10)
    ranks = Ranks(2)
    late, forgotten = key("late"), 0
    for call, first in enumerate(range(0, 60, 3)):
        keys = [key(f"t{at}") for at in range(first, first + 3)]
        often = key("often", call=call)
        decision, _ = ranks.round([late, often, *keys], [often, *keys])
        assert set(decision.ready) == set(tensors(often, *keys))
        assert decision.bases == {}, "they count on"
        forgotten += ranks.all[0].missing_ranks(late) == ()
    assert forgotten > 3
    assert ranks.round([late], [late])[0].ready == tensors(late)


COUNTS = {"a": 3, "b": 1, "c": 7}


def test_counts_begin_anew_when_all_ranks_have_heard_from_where(monkeypatch):
    monkeypatch.setattr(negotiation, "MOST_KNOWN", 2)
    ranks = Ranks(2)
    waiting = [key(name) for name in "efgh"]  # too many to be known: they are announced each time
    for number in range(600):  # more than ages are told apart
        mine = waiting if number % 4 < 2 else []
        counts = COUNTS if number % 2 == 0 else {**COUNTS, "a": 4}
        for decision in ranks.round(mine, [key("a", call=2)], counts=counts):
            assert decision.bases == (COUNTS if number % 2 else {}), "some may not have heard them"
    enough = {"a": 5, "b": 5}
    assert [one.bases for one in ranks.round([], [], counts=enough)] == [{}, {}]
    assert [one.bases for one in ranks.round([], [], counts=enough)] == [{}, {}]


def test_a_rank_that_missed_the_bases_or_their_confirmation_is_found(monkeypatch):
    monkeypatch.setattr(negotiation, "MOST_KNOWN", 2)
    ranks = Ranks(2)
    for _ in range(2):
        ranks.round([], [], counts=COUNTS)
        assert ranks.all[0].state != Negotiation(1, 2).state


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("times", [1, 3])
def test_a_round_that_fails_at_one_rank_does_not_part_the_bases(which, rank, times, monkeypatch):
    """Nothing is ready while ranks count from different bases, but before and after that."""
    monkeypatch.setattr(negotiation, "MOST_KNOWN", 2)
    ranks = Ranks(3)
    first = [0, 0, 0]  # which call of "a" each of them numbers 0
    for number in range(12):
        if len({one.state for one in ranks.all}) > 1:  # reducers tell by the names of the sums
            for one in ranks.all:
                one.reset()
        before = set(first)
        counts = COUNTS if before == {0} else {}
        ranks.exchange([one.ask([key("a")], [], counts) for one in ranks.all], range(3))
        for at, one in enumerate(ranks.all):
            if at == rank and which <= number < which + times:
                one.reset()
                continue
            decision = one.decide()
            assert bool(decision.ready) == (len(before) == 1)
            first[at] += decision.bases.get("a", 0)
    assert first == [COUNTS["a"]] * 3


@pytest.mark.parametrize("seed", range(20))
def test_all_is_reduced_whatever_the_order(seed):
    rng = random.Random(seed)
    world_size = rng.randint(1, 5)
    ranks = Ranks(world_size)
    keys = [key(f"t{at}", n=at) for at in range(rng.randint(1, 40))]
    to_come = [rng.sample(keys, len(keys)) for _ in range(world_size)]
    has = [[] for _ in range(world_size)]
    done = []
    while len(done) < len(keys):
        for rank in range(world_size):
            for _ in range(rng.randint(0, 6)):
                if to_come[rank]:
                    has[rank].append(to_come[rank].pop())
        ready = ranks.round(*has)[0].ready
        assert set(ready) == set(tensors(*set.intersection(*map(set, has))))
        done += ready
        has = [[one for one in mine if one.tensor not in ready] for mine in has]
    assert sorted(done) == sorted(tensors(*keys))
