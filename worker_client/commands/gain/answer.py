"""What the command says of its predictions, to people and to programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reducer.commands.terminal import FittedTable
from reducer.planning.network_model import fastest
from reducer.planning.step_model import AS_GOOD, Prediction, TrainingJob, Way, advised

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_ATTACHED = (
    "The script sends nothing through reducers: write worker_client.attach(model) after "
    "DistributedDataParallel(...), or these settings do nothing."
)


@dataclass(frozen=True)
class Answer:
    """Predictions for a job.

    Attributes:
        found: of a ring first, of no exchange last.
        now_s: a step as the script makes it now, as measured; None if it was not.
        measured_links: whether the links were measured, and not given.
        speeds: samples a second of each rank with nothing exchanged, or steps if nobody knows of
            samples; none of a run that was recorded.
        attached: whether the script's gradients go through reducers as it is; None if that is not
            known.
    """

    job: TrainingJob
    found: tuple[Prediction, ...]
    now_s: float | None
    measured_links: bool
    speeds: tuple[float, ...] = ()
    attached: bool | None = None

    def lines(self) -> Iterator[str]:
        """Yield what was measured, a sentence a line."""
        step, network = self.job.step, self.job.network
        parts = [f"a step computes for {_time(step.compute_s)}"]
        parts += [f"its backward pass {_time(step.backward_s)}"] if step.backward_s else []
        parts += [f"{step.nbytes / 1e6:,.4g} MB of gradients in {len(step.buckets)} buckets"]
        parts += [f"{step.samples} samples"] if step.samples else []
        yield ", ".join(parts)
        if len(self.speeds) > 1:
            each = ", ".join(f"{speed:,.3g}" for speed in self.speeds)
            yield f"ranks compute {each} {'samples' if step.samples else 'steps'} a second"
        how = "measured" if self.measured_links else "as given"
        yield (
            f"{self.job.nodes} machines, whose links carry {network.worker_rate / 1e6:,.4g} MB/s "
            f"({how}; a reducer's {network.reducer_rate / 1e6:,.4g} MB/s), round trips of "
            f"{_time(network.round_trip_s)}"
        )
        if self.job.ranks > self.job.nodes:
            yield "reducers sum what each machine's ranks have summed (REDUCTION_HIERARCHY=auto)"
        if self.now_s is not None:
            yield f"as the script is now a step takes {_time(self.now_s)}"

    def table(self) -> FittedTable:
        """Return a row for each way."""
        samples = self.job.step.samples
        names = ["way", "all-reduce", "step", "samples/s" if samples else "steps/s", "Gloo's / it"]
        rows = [
            [
                self.label(one.way),
                _time(one.all_reduce_s) if one.all_reduce_s else "-",
                _time(one.step_s),
                f"{(samples or 1) / one.step_s:,.4g}",
                f"{self._gain(one):.2f}x",
            ]
            for one in self.found
        ]
        return FittedTable("", names, rows, texts=1)

    def advice(self) -> str:
        """Say what to take."""
        taken, bound = advised(self.found), self.found[-1]
        if taken.way.kind == "gloo":
            return (
                f"Leave it as it is: nothing here gains {1 - AS_GOOD:.0%} without rounding more or "
                f"averaging less often, and no exchange at all {self._gain(bound) - 1:.0%}."
            )
        said = (
            f"Take {self._named(taken.way)}: a step is {self._gain(taken):.2f} times as fast as "
            f"with Gloo; with no exchange at all it would be {self._gain(bound):.2f} times."
        )
        if taken.way.kind == "diloco":
            alike = [one for one in self.found if one.way.kind == "reducers"]
            best_s = min(one.step_s for one in alike)
            taken = next(one for one in alike if one.step_s <= best_s / AS_GOOD)
            if self._gain(taken) >= 1 / AS_GOOD:
                said += (
                    f" Or keep the script's steps and take {self._named(taken.way)}: "
                    f"{self._gain(taken):.2f} times."
                )
        return f"{said} {NOT_ATTACHED}" if self.attached is False else said

    def _named(self, way: Way) -> str:
        if way.kind == "diloco":
            return f"{self.label(way)}, which trains otherwise (docs/slow-links.md)"
        return self.label(way) + (f" (REDUCTION_WIRE_DTYPE={way.wire})" if way.wire else "")

    def facts(self) -> dict[str, Any]:
        """Return all of it, for programs: seconds, bytes, and bytes per second."""
        samples = self.job.step.samples
        return {
            "measured": {
                **asdict(self.job.step),
                "buckets": [bucket._asdict() for bucket in self.job.step.buckets],
                "now_s": self.now_s,
                "speeds": self.speeds,
            },
            "links": {**self.job.network._asdict(), "measured": self.measured_links},
            "costs": {
                "cast_s": self.job.cast_s,
                "outer_s": self.job.outer_s,
                "call_s": self.job.call_s,
            },
            "ranks": self.job.ranks,
            "machines": self.job.nodes,
            "ways": [
                {
                    **one.way._asdict(),
                    "name": self.label(one.way),
                    "all_reduce_s": one.all_reduce_s,
                    "step_s": one.step_s,
                    "samples_per_s": samples and samples / one.step_s,
                    "speedup": self._gain(one),
                }
                for one in self.found
            ],
            "attached": self.attached,
            "advice": self.advice(),
        }

    def label(self, way: Way) -> str:
        """Return what a way is called."""
        job = self.job
        pool = "1 reducer" if way.reducers == 1 else f"{way.reducers} reducers"
        if not way.reducers:
            pool = "the ranks' own reducers"
        elif fastest(job.step.nbytes, job.nodes, way.reducers, job.network)[1] == "mixed":
            pool += " and the ranks' own"
        if way.kind == "diloco":
            return f"DiLoCo, every {job.every} steps, {way.wire}, {pool}"
        if way.kind == "reducers":
            return f"{pool}, {way.wire}" if way.wire else pool
        return {"gloo": "Gloo", "none": "no exchange"}[way.kind]

    def _gain(self, one: Prediction) -> float:
        return self.found[0].step_s / one.step_s


def _time(value_s: float) -> str:
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"
