"""Counts of named calls begin anew at all ranks, though a round fails at one of them."""

from contextlib import suppress

import numpy as np
import pytest

from reducer.errors import ReductionError, ReductionTimeout
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
