"""Real DDP while its reducers are killed, drained and lost: no step is lost, and no bit differs.

The short form of `torture.chaos`.
"""

import signal
import sys

import pytest

pytest.importorskip("torch", reason="needs torch")


from tests.ranks import Loopback
from torture.chaos_run import Blow, at_random, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")

WORKERS, REDUCERS, KILLS = 2, 3, 6
LONGEST_STALL_S = 3.0
PAUSE_S = 0.04  # leaves processors to reducers that start, and fewer steps to be made again
STEPS = 480  # what most of these trainings make at most


def run(blows):
    with Loopback(WORKERS + REDUCERS) as lab:
        return train(lab, WORKERS, blows, seed=0, pause_s=PAUSE_S)


class Undisturbed:
    """Weights of the training as it is without blows, made again if it must be longer."""

    def __init__(self):
        self._weights = {}

    def __call__(self, steps):
        """Return all ranks' weights after some steps."""
        if steps not in self._weights:
            with Loopback(WORKERS + 1) as lab:
                self._weights = train(lab, WORKERS, [], seed=0, steps=max(steps, STEPS)).weights
        return set(self._weights[steps])


@pytest.fixture(scope="module")
def undisturbed():
    return Undisturbed()


def assert_nothing_lost(record, undisturbed):
    assert record.errors == {}
    assert record.digests() == undisturbed(record.least_steps)
    assert len(record.digests()) == 1
    assert max(record.durations()) < LONGEST_STALL_S


@pytest.mark.extended("tests/integration/test_failures.py", "tests/integration/test_ddp.py")
def test_reducers_that_are_killed_and_come_back(impl, undisturbed):
    record = run(at_random(KILLS, REDUCERS, seed=0, number=signal.SIGKILL))
    assert_nothing_lost(record, undisturbed)
    assert len(record.blows) == KILLS
    assert record.totals["losses"] >= KILLS * WORKERS
    assert record.totals["moved"] > 0


@pytest.mark.extended("tests/integration/test_failures.py", "tests/integration/test_ddp.py")
def test_all_reducers_are_replaced_one_by_one_and_then_lost_but_one(impl, undisturbed):
    # One training, as most of the time goes to starting it.
    rolling = [Blow(reducer, number=signal.SIGTERM) for reducer in range(REDUCERS)]
    lost = [Blow(reducer, comes_back=False) for reducer in (1, 0)]
    record = run([*rolling, *lost])
    assert_nothing_lost(record, undisturbed)
    assert len(record.blows) == len(rolling) + len(lost)
    assert record.totals["losses"] >= len(record.blows) * WORKERS
