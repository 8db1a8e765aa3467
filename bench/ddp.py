"""DDP end to end: samples per second through reducers, through Gloo and with no exchange at all.

    python -m bench.ddp --workers 4 --reducers 4 --mbit 1000 --model resnet50

Every rank is a process on a host of its own in `lab`, with one model per variant:

- **reducers**: `worker_client.attach`.
- **gloo-25**, **gloo-64**: DDP's own all-reduce, with its default buckets and with ours.
- **no-op**: a hook that leaves the gradients as they are. No exchange can be faster.

The variants train in turn, a few steps each, round after round. `bench.ddp_models` says what they
train, `bench.ddp_figures` what the figures mean.
"""

import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import psutil
import typer

from bench import ddp_models, options, report
from bench.ddp_figures import NO_OP, OURS, Reports
from bench.results import DdpResults, Run
from harness.ranks import training
from lab import Lab, LabUnavailable
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB

BAR_SAMPLES = 1.4  # ours over the faster Gloo
BAR_EXPOSED = 1.1  # exposed communication over the ideal
WARMUP_STEPS = 3
TORCH_BYTES = 400 << 20  # of a process that has imported torch


@dataclass(frozen=True)
class Spec:
    """What is to be measured; the command line's options describe it."""

    model: str
    workers: int
    reducers: int
    compute_s: float
    gloo_caps_mb: tuple[int, ...]
    steps: int
    rounds: int

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Arguments of the ranks' `Variant`, ours first."""
        cap = DEFAULT_BUCKET_CAP_MB
        gloo = [
            # 25 is DDP's default, and only as the default does it come with a small first bucket.
            {"name": f"gloo-{mb}", "hook": "gloo", "cap_mb": None if mb == 25 else mb}
            for mb in self.gloo_caps_mb
        ]
        return [
            {"name": OURS, "hook": "reducers", "cap_mb": cap},
            *gloo,
            {"name": NO_OP, "hook": "no-op", "cap_mb": cap},
        ]

    @property
    def memory_bytes(self) -> int:
        """What all ranks need: per variant weights and gradients, and some of them once more."""
        copies = 2 * len(self.variants) + 2
        return self.workers * (TORCH_BYTES + copies * ddp_models.nbytes(self.model))


def measure(spec: Spec, lab: Lab) -> Reports:
    """Train in a lab with a host per worker and one per reducer."""
    reports = Reports(spec.workers)
    names = ("model", "compute_s", "variants", "steps", "rounds")
    arguments = {name: getattr(spec, name) for name in names} | {"warmup": WARMUP_STEPS}
    with training(lab, spec.workers, "bench.ddp_worker", arguments) as ranks:
        while ranks.running:
            if said := ranks.hear():
                reports.add(said)
    return reports


class Model(StrEnum):
    """What to train; `bench.ddp_models` describes each."""

    RESNET50 = "resnet50"
    GPT2 = "gpt2"
    MLP = "mlp"
    DIGITS = "digits"


def main(  # noqa: PLR0917 (options have names on the command line)
    model: Annotated[Model, typer.Option(help="What to train.")] = Model.RESNET50,
    workers: Annotated[int, typer.Option(min=1, help="Ranks, each on a host of its own.")] = 4,
    reducers: options.Reducers = 4,
    embedded: options.Embedded = False,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    compute: Annotated[
        str, typer.Option(help="Forward and backward time of a simulated model.")
    ] = "100ms",
    gloo_caps: Annotated[
        str, typer.Option(help="bucket_cap_mb of Gloo's variants; 25 is DDP's default, 64 ours.")
    ] = "25,64",
    steps: Annotated[int, typer.Option(min=1, help="Of a variant in a round.")] = 2,
    rounds: options.Rounds = 5,
    json: options.Json = None,
    plot: options.Plot = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail below the bars of the default run.")
    ] = False,
) -> None:
    """Train with DDP in several ways in one run, alternating, and print medians."""
    spec = Spec(
        model=model.value,
        workers=workers,
        reducers=0 if embedded else reducers,
        compute_s=seconds(compute),
        gloo_caps_mb=tuple(options.counts(gloo_caps)),
        steps=steps,
        rounds=rounds,
    )
    if spec.memory_bytes > psutil.virtual_memory().available:
        sys.exit(
            f"bench.ddp: {spec.model} needs {spec.memory_bytes / 1e9:.0f} GB of memory for "
            f"{workers} workers: take fewer, or one of --gloo-caps"
        )
    rate = options.link_rate(None if unshaped else mbit)
    run = options.begin("bench.ddp")
    with options.command("bench.ddp"), options.lab(workers + spec.reducers, rate) as lab:
        payload_rate = _payload_rate(lab)
        reports = measure(spec, lab)
    found = _results(run, spec, rate, payload_rate, reports)
    print(report.ddp_text(found))
    if json:
        found.write(json)
    if plot:
        plot.write_bytes(report.picture(found))
    failed = any(row.wrong for row in found.rows) or (check and not _reached(found))
    sys.exit(int(failed))


def _payload_rate(lab: Lab) -> float | None:
    if lab.mbit is None:
        return None
    try:
        return lab.payload_rate()
    except LabUnavailable as error:  # it is there to compare with, that is all
        print(f"# no wire limit: {error}")
        return None


def _results(
    run: Run, spec: Spec, mbit: float | None, payload_rate: float | None, reports: Reports
) -> DdpResults:
    nbytes = ddp_models.nbytes(spec.model)
    simulated = spec.model in ddp_models.ARCHITECTURES
    batch = ddp_models.workload(spec.model, spec.compute_s).batch
    return DdpResults(
        **dict(run),
        mbit=mbit,
        payload_rate=payload_rate,
        model=spec.model,
        nbytes=nbytes,
        parameters=sum(1 for _ in ddp_models.shapes(spec.model)),
        batch=batch,
        workers=spec.workers,
        reducers=spec.reducers,
        rounds=spec.rounds,
        steps=spec.steps,
        compute_ms=1e3 * spec.compute_s if simulated else None,
        backward_ms=1e3 * reports.median(NO_OP, "backward_s"),
        wire_ms=1e3 * nbytes / payload_rate if payload_rate else None,
        rows=[
            reports.row(one["name"], hook=one["hook"], cap_mb=one["cap_mb"], batch=batch)
            for one in spec.variants
        ],
        ours_over_gloo=reports.ours_over_gloo(),
    )


def _reached(found: DdpResults) -> bool:
    exposed = found.rows[0].exposed_over_ideal
    return found.ours_over_gloo >= BAR_SAMPLES and exposed is not None and exposed <= BAR_EXPOSED


def seconds(text: str) -> float:
    """Read a duration such as ``300ms`` or ``0.3s``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise typer.BadParameter(f"write a duration such as 300ms or 0.3s, not {text!r}")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


if __name__ == "__main__":
    typer.run(main)
