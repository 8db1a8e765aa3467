"""From what the ranks of `bench.ddp` report to figures: steps, exposed communication, ratios.

A step's time is that of the slowest rank. All ratios and differences are of turns of one round,
which follow each other within seconds; figures are medians over the rounds. README.md defines them.
"""

import math
import statistics
from collections import defaultdict
from typing import Any

from bench.results import DdpRow

OURS, NO_OP = "reducers", "no-op"


class Reports:
    """All that the ranks have said."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._turns: dict[str, list[list[dict[str, Any]]]] = {}
        self._exchanges: dict[str, list[list[float]]] = {}  # by hook, then by rank
        self._ends: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add(self, said: dict[str, Any]) -> None:
        """Take one report; those of one rank come in order."""
        event, rank = said["event"], said["rank"]
        if event == "turn":
            self._turns.setdefault(said["variant"], [[] for _ in range(self._ranks)])
            self._turns[said["variant"]][rank].append(said)
        elif event == "exchange":
            self._exchanges.setdefault(said["hook"], [[] for _ in range(self._ranks)])
            self._exchanges[said["hook"]][rank].append(said["seconds"])
        elif event == "end":
            self._ends[said["variant"]].append(said)

    def rounds_s(self, variant: str) -> list[float]:
        """Mean time of a step in each round."""
        return [
            max(statistics.fmean(said["steps_s"]) for said in of_round)
            for of_round in zip(*self._turns[variant], strict=True)
        ]

    def steps_s(self, variant: str) -> list[float]:
        """Time of each step of all rounds."""
        turns = self._turns[variant]
        by_rank = [[seconds for said in turn for seconds in said["steps_s"]] for turn in turns]
        return [max(map(float, of_step)) for of_step in zip(*by_rank, strict=True)]

    def median(self, variant: str, what: str) -> float:
        """Median of a figure over ranks and rounds."""
        return statistics.median(float(said[what]) for by in self._turns[variant] for said in by)

    def exchange_s(self, hook: str) -> float | None:
        """Time of one all-reduce of the model's bytes; None for a hook that does none."""
        by_rank = self._exchanges.get(hook)
        return statistics.median(map(max, zip(*by_rank, strict=True))) if by_rank else None

    def row(self, variant: str, *, hook: str, cap_mb: int | None, batch: int) -> DdpRow:
        """Return a variant's figures; `batch` is samples per rank and step."""
        rounds_s, steps_s = self.rounds_s(variant), sorted(self.steps_s(variant))
        step_s = statistics.median(rounds_s)
        pairs = zip(rounds_s, self.rounds_s(NO_OP), strict=True)
        exposed_s = statistics.median(one - other for one, other in pairs)
        all_reduce_s = self.exchange_s(hook)
        ideal_s = None
        if all_reduce_s is not None:
            ideal_s = max(0.0, all_reduce_s - self.median(NO_OP, "backward_s"))
        ends = sorted(self._ends[variant], key=lambda said: said["rank"])
        return DdpRow(
            variant=variant,
            bucket_cap_mb=cap_mb,
            samples_per_s=self._ranks * batch / step_s,
            rounds_ms=[1e3 * seconds for seconds in rounds_s],
            step_ms=1e3 * step_s,
            median_ms=1e3 * statistics.median(steps_s),
            p99_ms=1e3 * steps_s[math.ceil(0.99 * len(steps_s)) - 1],
            cpu_ms=1e3 * self.median(variant, "cpu_s"),
            exposed_ms=1e3 * exposed_s,
            all_reduce_ms=_ms(all_reduce_s),
            ideal_ms=_ms(ideal_s),
            exposed_over_ideal=exposed_s / ideal_s if ideal_s and ideal_s > step_s / 100 else None,
            wrong=sum(_wrong(said, ends[0]["digest"]) for said in ends),
            checked=sum(said["weights"] for said in ends),
            identical=len({said["digest"] for said in ends}) == 1 if ends else None,
            largest_difference=max((said["largest_difference"] for said in ends), default=None),
        )

    def ours_over_gloo(self) -> float:
        """Median over the rounds of the fastest Gloo's step over ours."""
        gloo = [self.rounds_s(name) for name in self._turns if name.startswith("gloo")]
        fastest = map(min, zip(*gloo, strict=True))
        pairs = zip(fastest, self.rounds_s(OURS), strict=True)
        return float(statistics.median(theirs / ours for theirs, ours in pairs))


def _wrong(said: dict[str, Any], digest: str) -> int:
    return int(said["unlike" if said["digest"] == digest else "weights"])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
