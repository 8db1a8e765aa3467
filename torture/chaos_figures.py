"""From what the ranks of `torture.chaos` report to figures: stalls, recoveries, bits.

A step lasts from when the first rank begins it to when the last one has finished it.
bench/README.md defines the figures.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict
from typing import Any

import numpy as np


class Record:
    """What the ranks of one training have reported.

    Attributes:
        blows: when reducers were ended, in seconds of the monotonic clock that all processes share.
        errors: what steps raised, by step.
        weights: fingerprints of all ranks, in any order, by the number of steps made.
        totals: what the ranks counted, summed.
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

    @property
    def most_steps(self) -> int:
        """Steps that some rank has made."""
        return max(self.steps)

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
