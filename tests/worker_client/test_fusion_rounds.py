"""Rounds that end differently at different ranks: they find together, and nothing is wrong."""

from contextlib import suppress

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, MismatchError, ReductionError, ReductionTimeout
from tests.worker_client.waits import at_all
from worker_client.fusion import fusion
from worker_client.fusion import negotiation as negotiation_module
from worker_client.fusion.negotiation import Negotiation


@pytest.fixture
def negotiations(monkeypatch):
    """The negotiation of each rank of the job that is made next."""
    made = {}

    def make(rank, world_size):
        made[rank] = Negotiation(rank, world_size)
        return made[rank]

    monkeypatch.setattr(fusion, "Negotiation", make)
    return made


@pytest.fixture
def queues(monkeypatch):
    """What has the requests of each fusion, by rank."""
    made = []
    waiting = fusion.Waiting

    def make(*given):
        made.append(waiting(*given))
        return made[-1]

    monkeypatch.setattr(fusion, "Waiting", make)
    return made


def reduce_all(clients, step, **arguments):
    """All ranks reduce some tensors; return what ended badly, by rank."""

    def train(client):
        tensors = [np.full(50, float(at + client.rank)) for at in range(20)]
        order = np.random.default_rng([step, client.rank]).permutation(20)
        works = {
            at: client.all_reduce(tensors[at], "sum", name=f"t{at}", **arguments) for at in order
        }
        bad = []
        for at, work in works.items():
            try:
                work.wait(30)
            except ReductionError as error:  # noqa: PERF203 (each may fail)
                bad.append(type(error).__name__)
            else:
                world_size = len(clients)
                expected = at * world_size + sum(range(world_size))
                assert (tensors[at] == expected).all()
        return bad

    return at_all(clients, train)


def test_a_rank_that_knows_other_tensors_is_found_and_all_begin_anew(job, negotiations):
    clients = job(3)
    assert reduce_all(clients, 0) == [[], [], []]
    negotiations[1].reset()
    assert reduce_all(clients, 1) == [[], [], []]


@pytest.mark.extended_cases("compiled-local-hear")
@pytest.mark.parametrize("which", ["ask", "hear"])
@pytest.mark.parametrize(
    "error",
    [ReductionTimeout("at a deadline"), LocalProtocolError("of this rank alone")],
    ids=["timeout", "local"],
)
def test_a_round_that_fails_at_one_rank_alone(job, negotiations, which, error, monkeypatch):
    clients = job(3)
    negotiation = negotiations[2]
    real, calls = getattr(negotiation, which), []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        return real(*arguments)

    monkeypatch.setattr(negotiation, which, fail_once)
    bad = reduce_all(clients, 0, timeout=3)
    assert calls
    if isinstance(error, ReductionTimeout):
        assert bad == [[], [], []], "it is tried again"
    else:
        assert {*bad[0], *bad[1], *bad[2]} <= {"LocalProtocolError", "ReductionTimeout"}
    for step in range(1, 4):
        assert reduce_all(clients, step) == [[], [], []]


def test_a_fused_all_reduce_that_one_rank_does_not_make(job, negotiations, monkeypatch):
    clients = job(3)
    assert reduce_all(clients, 0) == [[], [], []]
    negotiation = negotiations[0]
    real, decided = negotiation.decide, []

    def lose_once():
        decided.append(real())
        if decided[-1].ready and sum(bool(one.ready) for one in decided) == 1:
            raise MismatchError("?", field="name", rank=0, other_rank=1, expected="", got="")
        return decided[-1]

    monkeypatch.setattr(negotiation, "decide", lose_once)
    bad = reduce_all(clients, 1, timeout=2)
    assert {*bad[0], *bad[1], *bad[2]} <= {"MismatchError", "ReductionTimeout"}
    assert bad[1], "the others have asked for what rank 0 did not"
    assert reduce_all(clients, 2) == [[], [], []]


@pytest.mark.parametrize("which", range(3))
def test_counts_begin_anew_at_all_ranks_whichever_round_fails_at_one(
    job, negotiations, queues, which, monkeypatch
):
    monkeypatch.setattr(negotiation_module, "MOST_KNOWN", 5)
    clients = job(2)
    negotiation = negotiations[1]
    real, left = negotiation.decide, -1

    def fail_once():
        nonlocal left
        left -= 1
        if left == -1:
            raise ReductionTimeout("at this rank alone")
        return real()

    monkeypatch.setattr(negotiation, "decide", fail_once)

    def train(client):
        """Return the sums of a name that recurs, by step."""
        nonlocal left
        found = []
        for step in range(30):
            if step in {5, 20}:
                others = [
                    client.all_reduce(np.ones(4), "sum", name=f"x{step}-{at}", timeout=1)
                    for at in range(6)
                ]
            if (step, client.rank) == (5, 1):
                left = which
            data = np.full(4, 100.0**client.rank * (step + 1))
            with suppress(ReductionError):
                data = client.all_reduce(data, "sum", name="grad", timeout=5).wait(20)
                found += [(step, data[0])]
            if step in {10, 20}:
                for other in others:
                    with suppress(ReductionError):
                        other.wait(20)
        return found

    for found in at_all(clients, train):
        assert found == [(step, 101.0 * (step + 1)) for step, _ in found]
        assert [step for step, _ in found][-9:] == list(range(21, 30))
    assert [len(queue.submissions.calls) < 7 for queue in queues] == [True, True], "of 13 names"
