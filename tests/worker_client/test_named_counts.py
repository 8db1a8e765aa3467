"""Calls with names while rounds fail at one rank alone: what is summed belongs together."""

import numpy as np
import pytest

from reducer.errors import LocalProtocolError, MismatchError, ReductionError, ReductionTimeout
from tests.waits import eventually
from tests.worker_client.waits import at_all
from worker_client.fusion import fusion, negotiation
from worker_client.fusion.fusion import Fusion
from worker_client.fusion.negotiation import Negotiation, RoundDecision
from worker_client.fusion.tensor_queue import TensorQueue
from worker_client.staging.wire_rule import WireRule

PLACE = 1000.0  # of a sum, a rank has its own: so it shows whose calls are in it


@pytest.fixture
def disturbed(monkeypatch):
    """The negotiations of the job that is made next, by rank; each fails where it is told to.

    `failing` is how a round fails, before it is begun (`ask`), in its middle (`decode`) or after
    its end (`decide`): with which error, and after how many more rounds.
    """
    made = {}

    class Disturbed(Negotiation):
        failing = None

        def __init__(self, rank, world_size):
            super().__init__(rank, world_size)
            made[rank] = self

        def ask(self, *given):
            self._fail("ask")
            return super().ask(*given)

        def decode(self):
            self._fail("decode")
            return super().decode()

        def decide(self):
            self._fail("decide")
            return super().decide()

        def _fail(self, where):
            if self.failing is None or self.failing[0] != where:
                return
            _, error, rounds = self.failing
            self.failing = (where, error, rounds - 1) if rounds else None
            if not rounds:
                raise error("at this rank alone")

    monkeypatch.setattr(fusion, "Negotiation", Disturbed)
    return made


@pytest.fixture
def queues(monkeypatch):
    """The queue of each fusion of the job that is made next."""
    made = []
    monkeypatch.setattr(
        fusion, "TensorQueue", lambda *given: made.append(TensorQueue(*given)) or made[-1]
    )
    return made


def submit(client, name, number, timeout):
    data = np.full(1, number * PLACE**client.rank)
    return client.all_reduce(data, "sum", name=name, timeout=timeout)


def failure(client, work, number):
    """Return how a call failed, if it did. Otherwise its sum is right."""
    try:
        total = work.wait(20)
    except ReductionError as error:
        return f"{error!r}"
    assert total == number * sum(PLACE**rank for rank in range(client.world_size))
    return None


# The first rounds have announcements, later ones not. What ends in the middle is tried again.
@pytest.mark.parametrize(
    ("where", "error", "rounds"),
    [
        ("decode", ReductionTimeout, 0),
        ("decide", ReductionTimeout, 2),
        ("decide", LocalProtocolError, 0),
        ("ask", LocalProtocolError, 2),
    ],
)
def test_a_round_that_fails_at_one_rank_alone(job, disturbed, where, error, rounds):
    clients = job(3)
    disturbed[2].failing = where, error, rounds
    again = where == "decode"

    def train(client, steps, timeout):
        failed = []
        for step in steps:
            names = [*"ab", f"x{step}"]
            names = names[client.rank :] + names[: client.rank]
            numbers = {name: 3 * step + "abx".index(name[0]) + 1 for name in names}
            works = {name: submit(client, name, numbers[name], timeout) for name in names}
            failed += [failure(client, works[name], numbers[name]) for name in names]
        return [why for why in failed if why]

    kinds = {error.__name__, "ReductionTimeout", "MismatchError"}
    failed = at_all(clients, lambda client: train(client, range(5), 10 if again else 1))
    assert all(any(kind in why for kind in kinds) for its in failed for why in its)
    assert not again or failed == [[], [], []]
    assert at_all(clients, lambda client: train(client, range(5, 15), 10)) == [[], [], []]


@pytest.mark.parametrize("rounds", range(3))
def test_counts_begin_anew_at_all_ranks_whichever_round_fails_at_one(
    job, disturbed, queues, rounds, monkeypatch
):
    monkeypatch.setattr(negotiation, "MOST_KNOWN", 5)
    clients = job(2)

    def train(client):
        """Return the steps in which a name that recurs was summed."""
        found = []
        for step in range(30):
            if step in {5, 20}:
                others = [submit(client, f"x{step}-{at}", 1, 1) for at in range(6)]
            if (step, client.rank) == (5, 1):
                disturbed[1].failing = "decide", ReductionTimeout, rounds
            if not failure(client, submit(client, "grad", step + 1, 5), step + 1):
                found.append(step)
            if step in {10, 20}:
                for other in others:
                    failure(client, other, 1)
        return found

    for found in at_all(clients, train):
        assert found[-9:] == list(range(21, 30))
    assert [len(queue.calls) < 7 for queue in queues] == [True, True], "of 13 names"


class Alone:
    """The communicator of a job of one."""

    closing = in_callback = False

    def submit(self, operation):
        operation.end(None)

    def wait(self, *_):
        """All is over at once."""

    stop = wait


def fusion_of(communicator, world_size):
    options = {"cycle_s": 0.0, "timeout_s": 5.0, "wire": WireRule(None)}
    return Fusion(communicator, 0, world_size, 1 << 20, **options)


def test_a_round_that_other_ranks_do_not_make_is_made_again():
    other = {"rank": 0, "other_rank": 1, "expected": "", "got": ""}
    fields = "name", "total_bytes", "dtype", "op", "epoch"
    errors = [MismatchError("another call", field=field, **other) for field in fields]

    class OutOfStep(Alone):
        def submit(self, operation):
            operation.end(errors.pop() if errors else None)

    one = fusion_of(OutOfStep, 1)
    assert one.submit(np.ones(1), "sum", "a", 5).wait(5) == 1
    assert not errors
    one.stop()


def test_what_others_have_to_be_told_again_is_counted_from_the_same_base(monkeypatch):
    asked = []

    class Scripted(Negotiation):
        def ask(self, mine, given_up, counts):
            asked.append([(one.name, one.call) for one in given_up])
            return super().ask(mine, given_up, counts)

        def decide(self):
            if len(asked) > 1:
                raise ReductionTimeout("at this rank alone")
            return RoundDecision([], {}, {}, bases={"a": 1})

    monkeypatch.setattr(fusion, "Negotiation", Scripted)
    one = fusion_of(Alone, 3)
    for rounds, name in enumerate("ab", 1):
        one.decline(name, ValueError("none here"))
        eventually(lambda rounds=rounds: len(asked) >= rounds)
    eventually(lambda: len(asked) >= 3)
    one.stop()
    assert asked[:3] == [[("a", 0)], [("b", 0)], [("a", -1), ("b", 0)]]
