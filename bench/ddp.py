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
from enum import Enum
from pathlib import Path
from typing import Annotated

import psutil
import typer

from bench import ddp_models, options, report
from bench.ddp_figures import NO_OP, Reports
from bench.ddp_run import Spec, measure
from bench.results import DdpResults, Run
from harness import HarnessError
from lab import Lab, LabUnavailable

BAR_SAMPLES = 1.4  # ours over the faster Gloo
BAR_EXPOSED = 1.1  # exposed communication over the ideal


class Model(str, Enum):
    """What to train; `bench.ddp_models` describes each."""

    RESNET50 = "resnet50"
    GPT2 = "gpt2"
    MLP = "mlp"
    DIGITS = "digits"


def main(  # noqa: PLR0917 (options have names on the command line)
    model: Annotated[Model, typer.Option(help="What to train.")] = Model.RESNET50,
    workers: Annotated[int, typer.Option(min=1, help="Ranks, each on a host of its own.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers on hosts of their own.")] = 4,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="No such reducers: ranks host them.")
    ] = False,
    mbit: Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")] = 1000.0,
    unshaped: Annotated[
        bool, typer.Option("--unshaped", help="Loopback without shaping: the CPU is the limit.")
    ] = False,
    compute: Annotated[
        str, typer.Option(help="Forward and backward time of a simulated model.")
    ] = "100ms",
    gloo_caps: Annotated[
        str, typer.Option(help="bucket_cap_mb of Gloo's variants; 25 is DDP's default, 64 ours.")
    ] = "25,64",
    steps: Annotated[int, typer.Option(min=1, help="Of a variant in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often each has its turn.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture (PNG).")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail below the bars of the default run.")
    ] = False,
) -> None:
    """Train with DDP in several ways in one run, alternating, and print medians."""
    spec = Spec(
        model=model.value,
        workers=workers,
        reducers=0 if embedded else reducers,
        compute_s=_seconds(compute),
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
    try:
        with options.lab(workers + spec.reducers, rate) as lab:
            payload_rate = _payload_rate(lab)
            reports = measure(spec, lab)
    except (LabUnavailable, HarnessError) as error:
        sys.exit(f"bench.ddp: {error}")
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


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise typer.BadParameter(f"write a duration such as 300ms or 0.3s, not {text!r}")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


if __name__ == "__main__":
    typer.run(main)
