"""Ranks find out which tensors all of them have, in rounds without a network."""

import random
from types import MappingProxyType

import numpy as np
import pytest

from reducer.wire.constants import DType, ReduceOp
from tests.worker_client.transcripts import play, scenarios
from worker_client.fusion import negotiation
from worker_client.fusion.negotiation import (
    JOIN,
    GivenUp,
    Key,
    Negotiation,
    Tensor,
    group,
)


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
        heard = [self.all[rank].decode() for rank in present]
        self.announced = [None if one is None else one.copy() for one in heard]
        if heard[0] is not None:
            self.add_up(heard)

    def add_up(self, buffers):
        self.sums += 1
        assert len({buffer.size for buffer in buffers}) == 1
        total = np.sum(buffers, axis=0, dtype=np.uint8)
        for buffer in buffers:
            buffer[:] = total


class Script:
    """A job of a transcript, which has as many ranks as its first round."""

    def round(self, *words):
        said = [its.split() for its in " ".join(words).split("|")]
        self.ranks = getattr(self, "ranks", None) or Ranks(len(said))
        given_up = None
        for rank, its in enumerate(said):
            for word in its:
                if word.endswith("!"):
                    given_up = rank, GivenUp(word[0], 0, "ConfigError: no")
        keys = [[read(word) for word in its if word[-1] not in "!-"] for its in said]
        absent = [rank for rank, its in enumerate(said) if its == ["gone"]]
        decisions = self.ranks.round(*keys, absent=absent, given_up=given_up)
        (told,) = {tell(decision) for decision in decisions}
        return told

    def missing(self, word):
        (ranks,) = {one.missing_ranks(read(word)) for one in self.ranks.all}
        return ranks

    def wanted(self, rank):
        return " ".join(one.tensor.name for one in self.ranks.all[int(rank)].wanted()) or None

    def sums(self):
        return self.ranks.sums

    def agrees_with_a_new_one(self):
        return self.ranks.all[0].state == Negotiation(1, 2).state


def tell(decision):
    """Return what a rank has decided, for a transcript."""
    ready = " ".join(tensor.name for tensor in decision.ready)
    told = [f"ready {ready}"] if ready else []
    for one, error in decision.mismatched.items():
        pairs = f"rank {error.rank} {error.expected!r}, rank {error.other_rank} {error.got!r}"
        told.append(f"{one.tensor.name}#{one.call} {error.field}: {pairs}")
    told += [f"no {name}#{call}: {error}" for (name, call), error in decision.given_up.items()]
    return "; ".join(told + ["bases"] * bool(decision.bases))


def read(word):
    """Read a call of a transcript."""
    name, _, odd = word.partition("/")
    name, _, call = name.partition("#")
    how = {"call": int(call or 0)}
    for kind, values in {"dtype": DType, "op": ReduceOp}.items():
        how |= {kind: values[odd]} if odd in values.__members__ else {}
    how |= {"n": int(odd)} if odd.isdigit() else {"shape": odd} if odd.startswith("(") else {}
    return key(JOIN if name == "JOIN" else name, **how)


SCENARIOS = scenarios("negotiation.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_transcripts(scenario):
    assert list(play(Script(), SCENARIOS[scenario]))


def test_shapes_are_announced_where_they_are_given_and_once():
    ranks = Ranks(2)
    a, b = key("a", shape="(2, 1)"), key("b")
    ranks.round([a, b], [a, b])
    said = b'[["a",1,1,8,false,0,"(2, 1)"],["b",1,1,8,false,0]]'
    assert said in ranks.announced[0].tobytes()
    a, b = key("a", shape="(2, 1)", call=1), key("b", call=1)
    assert ranks.round([a, b], [a, b])[0].ready == tensors(a, b)
    assert ranks.announced == [None, None], "they were announced"


def test_a_rank_that_is_lost_in_the_midst_of_a_round_has_announced_nothing():
    ranks = Ranks(3)
    has = [[key("a")], [key("a")], [key("a"), key("b")]]
    ranks.add_up([one.ask(keys) for one, keys in zip(ranks.all, has, strict=True)])
    announced = [one.decode() for one in ranks.all]
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


# -- which tensors travel together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "threshold", "rounded_from", "apart", "groups"),
    [
        pytest.param((40, 60, 1, 99, 100), 101, None, False, [[0, 1, 2], [3], [4]], id="filled up"),
        pytest.param((40, 60, 1, 99, 100), 100, None, False, [[0, 1], [4], [2, 3]], id="as large"),
        pytest.param((40, 1000, 40), 100, None, False, [[1], [0, 2]], id="larger"),
        pytest.param((1, 2, 3, 0), 0, None, False, [[0], [1], [2], [3]], id="no threshold"),
        pytest.param((10, 40, 11, 50), 100, 40, False, [[0, 2], [1, 3]], id="16 bits"),
        pytest.param((10, 40, 11, 50), 100, 40, True, [[1], [3], [0, 2]], id="blocks"),
    ],
)
def test_buffers_are_filled_up_to_the_threshold(sizes, threshold, rounded_from, apart, groups):
    given = [key(f"{at}", n=nbytes).tensor for at, nbytes in enumerate(sizes)]
    rounded = lambda tensor: rounded_from is not None and tensor.nbytes >= rounded_from  # noqa: E731
    found = group(given, threshold, rounded, apart=apart)
    assert [[int(tensor.name) for tensor in together] for together in found] == groups


def test_types_and_reductions_are_apart():
    kinds = {"sum": {}, "half": {"dtype": DType.FLOAT16}, "mean": {"op": ReduceOp.MEAN}}
    given = [key(f"{kind}{at}", **how).tensor for at in range(2) for kind, how in kinds.items()]
    together = group(given, 100, lambda _: False)
    assert [[one.name for one in names] for names in together] == [
        [f"{kind}0", f"{kind}1"] for kind in kinds
    ]
