"""Averagings by quorum: ranks that are late, stopped amid one, or dead; the same bits at all."""

import random
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from reducer.errors import ConfigError, MembershipError, MismatchError, ReductionTimeout
from tests.conftest import joined, local_pool
from tests.integration.calls import each, process_of
from tests.integration.test_outer import (
    INT8,
    WIDE,
    Expected,
    Rank,
    layers,
    outer_state,
    outer_steps,
    weights,
)
from tests.ranks import ROOT, environments, ranks
from tests.waits import eventually, within_s
from worker_client.commands.demo.ranks import free_port
from worker_client.outer import OuterOptimizer
from worker_client.outer.quorum import Participant

SLOW_LINKS = ROOT / "docs" / "slow-links.md"


@pytest.mark.extended("test_ranks_and_numpy_have_the_same_bits")
@pytest.mark.parametrize("patience", ["1s", "60s"])
def test_one_of_eight_is_stopped_again_and_again(pool, patience):
    grace_s, port = 5.0, free_port()
    chance, stops = random.Random(patience), []
    (store,) = re.findall(r"^ +python -c \"(.*TCPStore.*)\"$", SLOW_LINKS.read_text(), re.M)
    store = re.sub(r"'[\d.]+', \d+", f"'127.0.0.1', {port}", store)
    given = environments(8, pool, REDUCTION_PATIENCE=patience, REDUCTION_TIMEOUT="60s")
    module = "tests.integration.quorum_rank"
    with (
        ranks(environments(1), "-c", store),
        ranks(given, "-m", module, port, 600, grace_s, talk=True) as job,
    ):
        assert [rank.stdout.readline() for rank in job] == ["begins\n"] * 8
        while all(rank.poll() is None for rank in job) and len(stops) < 8:
            time.sleep(chance.uniform(0.2, 1.0))
            at = chance.randrange(8)
            began = time.monotonic()
            job[at].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.2, 2 * grace_s))
            job[at].send_signal(signal.SIGCONT)
            stops.append((at, began, time.monotonic()))
            time.sleep(grace_s)  # it is in step again
        results = job.results()
    seen = {}
    for result in results:  # every outer step of a fragment is the same at all ranks that have it
        for step, digest in result["digests"].items():
            assert seen.setdefault(step, digest) == digest, f"outer step {step} differs"
    assert len({result["weights"] for result in results}) == 1
    assert sum(result["left_out"] for result in results) > 0
    waits = [
        end - begin
        for rank, result in enumerate(results)
        for begin, end in result["waits"]
        if not any(one == rank and begin < to and since < end for one, since, to in stops)
    ]
    sys.stdout.write(f"{len(stops)} stops, longest wait {max(waits):.2f} s\n")
    assert max(waits) < 1.1 * grace_s


class Impatience:
    """Has ranks wait for others for a moment, or for long, whatever a busy machine does.

    Attributes:
        now: whether the ranks do not wait for late ones.
    """

    now = False

    def __init__(self, monkeypatch):
        begin = Participant.__init__

        def choose(participant, rank, rules, *arguments, **named):
            rules = rules._replace(grace_s=0.1 if self.now else 60.0)
            begin(participant, rank, rules, *arguments, **named)

        monkeypatch.setattr(Participant, "__init__", choose)


@pytest.mark.extended_cases("0")
@pytest.mark.parametrize("delay", [0, 2])
def test_ranks_and_numpy_have_the_same_bits(pool, monkeypatch, delay):
    every = 5
    settings = {"every": every, "delay": delay, "min_ranks": 2, "grace": 60, "store": HashStore()}
    impatient = Impatience(monkeypatch)
    unheard = []
    complete = Participant.complete

    def lose(self):
        """As a rank whose connections broke before its results came."""
        if self._rank not in unheard:
            complete(self)
            return
        unheard.remove(self._rank)
        time.sleep(0.3)  # the others have decided
        self.fail(())

    monkeypatch.setattr(Participant, "complete", lose)
    expected = Expected(3, {"delay": delay})

    def learn(first, end):
        for rank in range(3):
            for step in range(first, end):
                expected.learn(rank, step, TOKENS[rank])

    def train(client, until):
        ranks[client.rank].train(until, TOKENS[client.rank])

    with joined(3, servers=pool, job="quorum", timeout=20) as clients:
        ranks = each(clients, lambda client: Rank(client, settings))
        learn(0, every - 1)
        each(clients, lambda client: train(client, every - 1))
        for number, (members, lost) in enumerate(AVERAGINGS):
            begins = every * (number + 1) - 1
            learn(begins, begins + 1)
            averaging = expected.begin(0, members)
            learn(begins + 1, begins + 1 + delay)
            expected.merge(*averaging, unheard=lost)
            unheard[:] = [] if lost is None else [lost]
            in_time = [client for client in clients if client.rank in members]
            late = [client for client in clients if client.rank not in members]
            impatient.now = bool(late)
            for group in (in_time, late):
                if group:
                    each(group, lambda client: train(client, begins + every))  # noqa: B023
            assert not unheard
            learn(begins + 1 + delay, begins + every)
            found = [outer_state(rank) for rank in ranks]
            assert found == [expected.outer_state(rank) for rank in range(3)], number
            assert [outer_steps(rank) for rank in ranks] == expected.made
        impatient.now = False
        assert [rank.outer.left_out for rank in ranks] == [0, 1, 3]
        each(clients, lambda client: ranks[client.rank].outer.finish())
        assert len({weights(rank.model) for rank in ranks}) == 1
        ended = weights(ranks[0].model)
        assert ended == outer_state(ranks[1])[0]
        each(clients, lambda client: ranks[client.rank].outer.finish())
        assert weights(ranks[0].model) == ended, "nothing was learned since"


TOKENS = (100.0, 130.0, 160.0)
# Whose contributions count, and who of them does not get the mean.
AVERAGINGS = [
    ([0, 1, 2], None),
    ([0, 1], None),
    ([0, 1, 2], None),
    ([0, 1], None),
    ([0, 1, 2], 1),
    ([0, 1, 2], None),
    ([0, 2], None),
    ([0, 1, 2], None),
    ([0, 1], None),
    ([0, 1, 2], 2),
]


def test_a_checkpoint_of_ranks_of_which_one_is_behind(pool, monkeypatch):
    settings = {"every": 5, "min_ranks": 2, "grace": 60, "store": HashStore()}
    impatient = Impatience(monkeypatch)
    with joined(3, servers=pool, job="quorum", timeout=20, **INT8) as clients:
        ranks = each(clients, lambda client: Rank(client, settings, WIDE))
        each(clients, lambda client: ranks[client.rank].train(9))
        impatient.now = True
        each(clients[:2], lambda client: ranks[client.rank].train(14))
        ranks[2].train(14)
        impatient.now = False
        saved = [rank.saved() for rank in ranks]
        assert [outer_steps(rank) for rank in ranks] == [2, 2, 1]

        def go_on(client):
            rank = ranks[client.rank].train(22)
            kept = rank.outer.state_dict()["fragments"][0]
            rank.outer.finish()
            return weights(rank.model), [
                kept[key].numpy().tobytes() for key in ("outer", "velocity")
            ]

        went_on = each(clients, go_on)
        assert [one == went_on[0] for one in went_on] == [True] * 3
        for rank, file in zip(ranks, saved, strict=True):
            rank.load(file)
        assert each(clients, go_on) == went_on


@pytest.mark.extended("test_ranks_and_numpy_have_the_same_bits")
def test_too_few_ranks(pool):
    settings = {"every": 2, "min_ranks": 2, "grace": 60, "store": HashStore()}
    with joined(3, servers=pool, job="quorum", timeout=3) as clients:
        ranks = each(clients, lambda client: Rank(client, settings))
        with pytest.raises(
            ReductionTimeout, match=r"within 3 s, .*: ranks 1, 2 have not come"
        ) as error:
            ranks[0].train(2)
        assert error.value.missing == (1, 2)
        ranks[0].step += 1
        each(clients, lambda client: ranks[client.rank].train(4 + 2 * (client.rank == 0)))
        first, *others = [outer_state(rank) for rank in ranks]
        assert others == [first] * 2


class Store(HashStore):
    """A store that may be gone after a while.

    Attributes:
        registers: keys of what the ranks decide in.
    """

    def __init__(self):
        super().__init__()
        self.registers = set()
        self.gone = False

    def compare_set(self, key, *values):
        self.registers.add(key)
        if self.gone:
            raise RuntimeError("connection reset by peer")
        return super().compare_set(key, *values)


def test_ranks_that_differ(pool):
    store = Store()
    settings = {"every": 2, "min_ranks": 2, "grace": 60, "store": store}
    with joined(2, servers=pool, job="quorum", timeout=20) as clients, ThreadPoolExecutor(1) as one:
        ranks = each(clients, lambda client: Rank(client, settings).train(2))
        ranks[1].outer.lr = 0.5
        first = one.submit(ranks[0].train, 4)
        eventually(lambda: b'"arrived": {"0"' in store.get(*store.registers))
        said = r"learning rate and momentum: rank 0 says \(0.7, 0.9\), rank 1 says \(0.5, 0.9\)"
        with pytest.raises(MismatchError, match=said):
            ranks[1].train(4)
        ranks[1].outer.lr, ranks[1].step = 0.7, 4
        ranks[1].train(6)
        assert outer_state(ranks[1]) == outer_state(first.result(20))
        with pytest.raises(MismatchError, match="ranks disagree on grace: rank 0"):
            each(clients, lambda c: Rank(c, {**settings, "grace": 60 + c.rank}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"grace": 1.0}, "grace= and store= go with min_ranks="),
        ({"min_ranks": 3, "grace": 1.0, "store": HashStore()}, "min_ranks=3: give 1 to 2"),
        ({"min_ranks": 2, "grace": 1.0}, "min_ranks= needs grace=.* and store="),
        ({"min_ranks": 2, "grace": 0, "store": HashStore()}, "grace=0: give more than 0 s"),
    ],
)
def test_wrong_arguments(pool, arguments, said):
    with joined(2, servers=pool, job="quorum") as (client, _):
        with pytest.raises(ConfigError, match=said):
            OuterOptimizer(layers(), client, every=2, **arguments)
        with pytest.raises(ConfigError, match="weight= takes a finite number"):
            OuterOptimizer.step(OuterOptimizer.__new__(OuterOptimizer), tokens=-1.0)


def test_jobs_that_cannot_have_one_of_some_ranks(pool):
    quorum = {"min_ranks": 1, "grace": 1.0, "store": HashStore()}
    with (
        joined(1, servers=pool, job="quorum", on_rank_lost="continue") as (client,),
        pytest.raises(ConfigError, match="without REDUCTION_FALLBACK, REDUCTION_ON_RANK_LOST"),
    ):
        OuterOptimizer(layers(), client, every=2, **quorum)


@pytest.mark.extended("test_ranks_and_numpy_have_the_same_bits")
def test_a_reducer_dies_and_the_bits_are_the_same():
    def train(*, kill):
        settings = {"every": 5, "min_ranks": 2, "grace": 10.0, "store": HashStore()}
        with local_pool(2) as servers, joined(3, servers=servers, job="quorum", **INT8) as clients:
            ranks = each(clients, lambda client: Rank(client, settings, WIDE).train(9))
            if kill:
                process_of(servers[1]).kill()
                eventually(lambda: not any(all(client.in_use) for client in clients))
            began = time.monotonic()
            each(clients, lambda client: ranks[client.rank].train(10))
            within_s(8, began, "not when the grace ends")
            each(clients, lambda client: ranks[client.rank].outer.finish())
            assert [rank.outer.left_out for rank in ranks] == [0] * 3
            return [outer_state(rank) for rank in ranks]

    assert train(kill=True) == train(kill=False)


def be_late(patch, client):
    """Have a rank contribute when the others have given it up."""
    subgroup = client.subgroup

    def late(*given):
        time.sleep(3.0)
        return subgroup(*given)

    patch.setattr(client, "subgroup", late)


def test_a_void_attempt_leaves_no_trace(pool, monkeypatch):
    def train(*, void):
        settings = {"every": 5, "min_ranks": 2, "grace": 1.5, "store": HashStore()}
        with joined(3, servers=pool, job="quorum", timeout=20, **INT8) as clients:
            ranks = each(clients, lambda client: Rank(client, settings, WIDE).train(9))
            with monkeypatch.context() as patch:
                if void:
                    be_late(patch, clients[1])
                    each(clients, lambda client: ranks[client.rank].train(14))
                else:
                    each(clients[::2], lambda client: ranks[client.rank].train(14))
                    ranks[1].train(14)
            assert [rank.outer.left_out for rank in ranks] == [0, 1, 0]
            return [outer_state(rank) for rank in ranks]

    assert train(void=True) == train(void=False)


@pytest.mark.extended("test_ranks_and_numpy_have_the_same_bits")
def test_the_last_averaging_of_the_others_ends_without_a_rank(pool, monkeypatch):
    settings = {"every": 5, "min_ranks": 2, "grace": 1.5, "store": HashStore()}
    with joined(3, servers=pool, job="quorum", timeout=20) as clients:
        ranks = each(clients, lambda client: Rank(client, settings).train(8))
        be_late(monkeypatch, clients[1])

        def finish(client):
            try:
                ranks[client.rank].outer.finish()
            except ReductionTimeout as error:
                return str(error)
            return ""

        first, second, third = each(clients, finish)
        assert (first, third) == ("", "")
        assert "have made their last averaging without this one" in second
        assert weights(ranks[0].model) == weights(ranks[2].model) != weights(ranks[1].model)
        assert outer_state(ranks[1]) != outer_state(ranks[0]), "it has no part in that"


def test_a_store_that_is_gone(pool):
    store = Store()
    settings = {"every": 2, "min_ranks": 1, "grace": 60, "store": store}
    with joined(1, servers=pool, job="quorum") as (client,):
        rank = Rank(client, settings).train(3)
        before = outer_state(rank)
        store.gone = True
        with pytest.raises(MembershipError, match=r"has failed \(connection reset by peer\)"):
            rank.train(4)
        assert outer_state(rank) == before
        store.gone, rank.step = False, 4
        rank.train(6)
        store.delete_key(*store.registers)  # as if it were another one
        with pytest.raises(MismatchError, match="rank 0 says 0, rank 0 says 2"):
            rank.train(8)
