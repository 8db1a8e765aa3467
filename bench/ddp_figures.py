"""From what the ranks of `bench.ddp` report to figures: steps, exposed communication, ratios.

A step's time is that of the slowest rank. All ratios and differences are of turns of one round,
which follow each other within seconds; figures are medians over the rounds. README.md defines them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from datetime import datetime  # noqa: TC003 (pydantic reads it)
from typing import Any, Literal

from bench.results import SCHEMA, Machine, Record

OURS, NO_OP = "reducers", "no-op"


class Row(Record):
    """One way to average gradients."""

    variant: str
    bucket_cap_mb: int | None
    """None: DDP's default, 25 and a first bucket of 1."""
    samples_per_s: float
    """Of all ranks."""
    rounds_ms: list[float]
    """A step's mean time in each round."""
    step_ms: float
    """Median of the rounds."""
    median_ms: float
    """Of all single steps."""
    p99_ms: float
    """Of all single steps; the slowest one if there are less than a hundred."""
    cpu_ms: float
    """Processor time of a step and rank, all threads."""
    exposed_ms: float
    """Step minus the step of the no-op hook."""
    all_reduce_ms: float | None
    """One all-reduce of as many bytes, with nothing beside it."""
    ideal_ms: float | None
    """All-reduce minus the backward pass, or 0: what no overlap can hide."""
    exposed_over_ideal: float | None
    """None where the ideal is less than a hundredth of the step: the ratio is noise."""
    wrong: int
    """Weights that differ from rank 0's in a bit, or from those of the first Gloo variant by more
    than rounding."""
    checked: int
    identical: bool | None
    """Whether all ranks have the same bits."""
    largest_difference: float | None
    """Between a weight of this variant and of the first Gloo variant."""


class DdpResults(Record):
    """One run of `bench.ddp`."""

    schema_version: int = SCHEMA
    kind: Literal["ddp"] = "ddp"
    time: datetime
    machine: Machine
    command: str
    environment: dict[str, str]
    """``REDUCTION_`` variables."""
    load: float
    """Load average of the last minute when it began: what else the machine was doing."""
    mbit: float | None
    """Rate of every link each way in Mbit/s; None: not shaped, so that processors are the limit."""
    payload_rate: float | None
    """Bytes per second of one TCP stream between two hosts, by iperf3; None if not shaped."""
    model: str
    nbytes: int
    """Of the model's gradients."""
    parameters: int
    """Tensors."""
    batch: int
    """Samples per rank and step."""
    workers: int
    reducers: int
    """On hosts of their own; 0: embedded."""
    rounds: int
    steps: int
    """Of every variant and round."""
    compute_ms: float | None
    """Simulated forward and backward pass; None: a real one."""
    backward_ms: float
    """Backward pass with the no-op hook."""
    wire_ms: float | None
    """The gradients' bytes over the payload rate: no worker can send or receive them faster."""
    rows: list[Row]
    ours_over_gloo: float
    """Samples per second, against the better one of Gloo's variants in each round."""


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

    def row(self, variant: str, *, hook: str, cap_mb: int | None, batch: int) -> Row:
        """Return a variant's figures; `batch` is samples per rank and step."""
        rounds_s, steps_s = self.rounds_s(variant), sorted(self.steps_s(variant))
        step_s = statistics.median(rounds_s)
        exposed_s = _difference(rounds_s, self.rounds_s(NO_OP))
        all_reduce_s = self.exchange_s(hook)
        ideal_s = None
        if all_reduce_s is not None:
            ideal_s = max(0.0, all_reduce_s - self.median(NO_OP, "backward_s"))
        ends = sorted(self._ends[variant], key=lambda said: said["rank"])
        return Row(
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


def table(results: DdpResults) -> str:
    """Return the figures as text."""
    lines = [
        f"# {results.model}: {results.nbytes / 1e6:.1f} MB of gradients in {results.parameters} "
        f"tensors, {_link(results.mbit)}, {results.workers} workers, "
        + (f"{results.reducers} reducers" if results.reducers else "embedded reducers"),
        f"# backward {results.backward_ms:.0f} ms, "
        + (f"wire limit {results.wire_ms:.0f} ms, " if results.wire_ms else "")
        + f"medians of {results.rounds} alternated rounds of {results.steps} steps, ms",
        (
            f"{'variant':>10} {'cap MB':>7} {'samples/s':>10} {'step':>8} {'median':>8} {'p99':>8}"
            f" {'cpu':>7} {'exposed':>8} {'all-reduce':>11} {'ideal':>8} {'/ ideal':>8}"
            f" {'#wrong':>7}"
        ),
    ]
    lines += [
        f"{row.variant:>10} {row.bucket_cap_mb or '25 (1)':>7} {row.samples_per_s:>10.1f}"
        f" {row.step_ms:>8.1f} {row.median_ms:>8.1f} {row.p99_ms:>8.1f} {row.cpu_ms:>7.1f}"
        f" {row.exposed_ms:>8.1f} {_number(row.all_reduce_ms, 1):>11} {_number(row.ideal_ms, 1):>8}"
        f" {_number(row.exposed_over_ideal, 2):>8} {row.wrong:>7}"
        for row in results.rows
    ]
    ours = results.rows[0]
    bits = "the same bits" if ours.identical else "DIFFERENT BITS"
    lines += [
        f"samples/s, ours over the faster Gloo: {results.ours_over_gloo:.2f}",
        f"weights: {bits} at all ranks, at most {ours.largest_difference:.1e} from Gloo's",
    ]
    return "\n".join(lines)


def _wrong(said: dict[str, Any], digest: str) -> int:
    return int(said["unlike" if said["digest"] == digest else "weights"])


def _difference(these: list[float], those: list[float]) -> float:
    return statistics.median(one - other for one, other in zip(these, those, strict=True))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _link(mbit: float | None) -> str:
    return "unshaped" if mbit is None else f"{mbit:g} Mbit/s"
