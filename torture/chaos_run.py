"""The parent's side of `torture.chaos_worker`: a training whose reducers die and come back.

A step lasts from when the first rank begins it to when the last one has finished it.
bench/README.md defines the figures.
"""

import random
import signal
import statistics
import subprocess
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import HarnessError
from harness.pool import Pool
from harness.ranks import Ranks
from lab import Lab
from torture.failpoints import Place

PLACES = [place.text for place in Place if place <= Place.REDUCER_TICK]
MOST_PASSES = 100  # of a failpoint before the one that kills
REST_S = 0.5  # at most, from when all reducers are in use to the next blow
LISTEN_S = 0.02
PATIENCE_S = 60.0  # for what takes seconds on a busy machine


@dataclass(frozen=True)
class Blow:
    """What happens to a reducer.

    Attributes:
        reducer: which.
        rest_s: how long everything has been well before.
        number: the signal that ends it, SIGKILL or SIGTERM.
        failpoint: instead of a random instant; see `torture.failpoints`.
    """

    reducer: int
    rest_s: float = 0.0
    number: signal.Signals = signal.SIGKILL
    failpoint: str = ""


def at_random(count: int, reducers: int, seed: int, number: signal.Signals) -> list[Blow]:
    chance = random.Random(seed)  # noqa: S311 (to be repeated)
    return [
        Blow(chance.randrange(reducers), chance.uniform(0, REST_S), number) for _ in range(count)
    ]


def at_failpoints(count: int, reducers: int, workers: int, seed: int) -> list[Blow]:
    """Return blows at every failpoint of a reducer in turn, each at a random pass."""
    chance = random.Random(seed)  # noqa: S311 (to be repeated)
    blows = []
    for turn in range(count):
        place = PLACES[turn % len(PLACES)]
        # Every worker is welcomed once.
        passes = chance.randint(1, workers if place == "reducer.welcome" else MOST_PASSES)
        victim = chance.randrange(reducers)
        blows.append(Blow(victim, failpoint=f"{place}=kill@{passes}"))
    return blows


class Record:
    """What the ranks of one training have reported.

    Attributes:
        blows: when reducers were ended, in seconds of the monotonic clock that all processes share.
        errors: what steps raised, by step.
        weights: fingerprints of all ranks, in any order, by the number of steps made.
        steps: how many each rank has made.
    """

    def __init__(self, workers: int) -> None:
        self.blows: list[float] = []
        self.errors: dict[int, list[str]] = {}
        self.weights: dict[int, list[str]] = defaultdict(list)
        self.totals: dict[str, int] = defaultdict(int)
        self.steps = [0] * workers
        self._uses: list[list[bool]] = [[]] * workers
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}

    def add(self, said: dict[str, Any]) -> None:
        """Take a rank's report."""
        event, rank = said.pop("event"), said.pop("rank")
        if event == "weights":
            self.weights[said["step"]].append(said["digest"])
        elif event == "end":
            for name, count in said.items():
                self.totals[name] += count
        else:
            step = said["step"]
            self.steps[rank] = step + 1
            self._uses[rank] = said["uses"]
            self._began[step] = min(said["began"], self._began.get(step, said["began"]))
            self._ended[step] = max(said["ended"], self._ended.get(step, said["ended"]))
            if said["error"]:
                self.errors.setdefault(step, []).append(f"rank {rank}: {said['error']}")

    @property
    def least_steps(self) -> int:
        """Steps that every rank has made."""
        return min(self.steps)

    def all_use(self, reducer: int) -> bool:
        """Whether a reducer was in use at every rank after its latest step."""
        return all(uses and uses[reducer] for uses in self._uses)

    def durations(self) -> list[float]:
        """Return the seconds of each step; the first two, in which torch prepares, are left out."""
        return [self._ended[step] - self._began[step] for step in range(2, self.least_steps)]

    def recoveries(self) -> list[float]:
        """Return the seconds from each blow to when all ranks had finished a step."""
        ends = sorted(self._ended[step] for step in range(self.least_steps))
        places = [(blow, bisect_right(ends, blow)) for blow in self.blows]
        return [ends[place] - blow for blow, place in places if place < len(ends)]

    def digests(self) -> set[str]:
        """Return the fingerprints of the final weights, one if all ranks have the same bits."""
        return set(self.weights[self.least_steps])


def figures(disturbed: Record, undisturbed: Record) -> dict[str, Any]:
    """Return the figures of `bench.results.ChaosResults` from two trainings of as many steps."""
    durations, recoveries = disturbed.durations(), disturbed.recoveries() or [0.0]
    median = statistics.median(durations)
    lost = {**undisturbed.errors, **disturbed.errors}
    return {
        "kills": len(disturbed.blows),
        "steps": disturbed.least_steps,
        "lost": len(disturbed.errors) + len(undisturbed.errors),
        "errors": lost[min(lost)] if lost else [],
        "identical": len(disturbed.digests() | undisturbed.digests()) == 1,
        "median_s": median,
        "undisturbed_s": statistics.median(undisturbed.durations()),
        "stall_s": max(durations) - median,
        "recovery_median_s": statistics.median(recoveries),
        "recovery_p99_s": float(np.percentile(recoveries, 99, method="higher")),
        **{name: disturbed.totals[name] for name in ("moved", "claimed", "supplied")},
    }


class Training:
    """A training that goes on while reducers are ended and started."""

    def __init__(self, ranks: Ranks, reducers: Pool, workers: int) -> None:
        self.record = Record(workers)
        self._ranks = ranks
        self._pool = reducers

    def suffer(self, blow: Blow) -> None:
        """Let a blow happen, and wait until every rank has got over it."""
        self.rest(blow.rest_s)
        victim = blow.reducer
        if blow.failpoint:
            self._pool.end(victim, signal.SIGTERM)
            self._pool.launch(victim, blow.failpoint)
            self.until(lambda: self._pool.has_ended(victim), f"{blow.failpoint} is passed")
            self.record.blows.append(time.monotonic())
        else:
            self.record.blows.append(time.monotonic())
            self._pool.end(victim, blow.number)
        self._pool.start(victim)
        # Who has made two steps since has noticed: each needs all reducers that are in use.
        self.progress(2)
        self.until(lambda: self.record.all_use(victim), f"all ranks use reducer {victim} again")

    def progress(self, steps: int) -> None:
        """Wait until every rank has made some steps more than any has now."""
        while self._hear(0.0):
            pass  # what they have said in the meantime
        goal = max(self.record.steps) + steps
        self.until(lambda: self.record.least_steps >= goal, f"all ranks make step {goal}")

    def rest(self, seconds: float) -> None:
        """Let it train for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._hear(left)

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Let it train until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > end:
                made = f"steps made by rank: {self.record.steps}"
                raise self._ranks.stalled(f"{PATIENCE_S:g} s did not suffice until {what}; {made}")
            self._hear(LISTEN_S)

    def wait(self) -> None:
        """Wait until all ranks have stopped."""
        heard = time.monotonic()
        while self._ranks.running:
            if self._hear(LISTEN_S):
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE_S:
                raise self._ranks.stalled(f"no rank has made a step for {PATIENCE_S:g} s")

    def _hear(self, patience_s: float) -> bool:
        said = self._ranks.hear(patience_s)
        if said is not None:
            self.record.add(said)
        return said is not None


def train(
    lab: Lab,
    workers: int,
    blows: Iterable[Blow],
    *,
    seed: int,
    steps: int | None = None,
) -> Record:
    """Train on a lab, whose first hosts are the workers', and all others the reducers'.

    It ends after so many steps, or, if they are None, when all blows have happened.

    Raises:
        HarnessError: a process failed; the message holds the end of what it said.
    """
    reducers = Pool(lab.hosts[workers:])
    given = {"seed": seed, "steps": steps}
    try:
        hosts, module = lab.hosts[:workers], "torture.chaos_worker"
        with Ranks(module, hosts, given, reducers.addresses) as ranks:
            training = Training(ranks, reducers, workers)
            training.progress(2)
            for blow in blows:
                training.suffer(blow)
            if steps is None:
                ranks.tell("stop")  # all at the same step
            training.wait()
            return training.record
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"a reducer did not end: {error}") from None
    finally:
        reducers.stop()
