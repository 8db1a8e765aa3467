"""DDP end to end: samples per second through reducers, through Gloo and with no exchange at all.

    python -m bench.ddp [--workers 4] [--reducers 4 | --embedded] [--model resnet50] [--json FILE]

Every rank is a process on a host of its own in `bench.lab`, with one model per variant:

- **reducers**: `worker_client.attach`.
- **gloo-25**, **gloo-64**: DDP's own all-reduce, with its default buckets and with ours.
- **no-op**: a hook that leaves the gradients as they are. No exchange can be faster.

The variants train in turn, a few steps each, round after round. `bench.ddp_models` says what they
train, `bench.ddp_figures` what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench import ddp_models, results
from bench.crew import CrewError
from bench.ddp_figures import NO_OP, DdpResults, table
from bench.ddp_plot import plot
from bench.ddp_run import Spec, measure
from bench.lab import Lab, LabUnavailable
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.ddp_figures import Reports

GLOO_CAPS_MB = (25, DEFAULT_BUCKET_CAP_MB)
BAR_SAMPLES = 1.4  # ours over the faster Gloo
BAR_EXPOSED = 1.1  # exposed communication over the ideal


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    spec = Spec(
        model=options.model,
        workers=options.workers,
        reducers=0 if options.embedded else options.reducers,
        compute_s=options.compute,
        gloo_caps_mb=tuple(options.gloo_caps),
        steps=options.steps,
        rounds=options.rounds,
    )
    if spec.memory_bytes > psutil.virtual_memory().available:
        print(
            f"bench.ddp: {spec.model} needs {spec.memory_bytes / 1e9:.0f} GB of memory for "
            f"{spec.workers} workers: take fewer, or fewer --gloo-caps",
            file=sys.stderr,
        )
        return 1
    hosts = spec.workers + spec.reducers
    mbit = None if options.unshaped else options.mbit
    load = os.getloadavg()[0]
    try:
        with Lab.loopback(hosts) if options.loopback else Lab(hosts, mbit) as lab:
            found = _results(spec, lab, measure(spec, lab), load)
    except (LabUnavailable, CrewError) as error:
        print(f"bench.ddp: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.json:
        options.json.write_text(found.model_dump_json(indent=1) + "\n")
    if options.plot:
        plot(found, options.plot)
    if any(row.wrong for row in found.rows):
        return 1
    return 1 if options.check and not _reached(found) else 0


def _results(spec: Spec, lab: Lab, reports: Reports, load: float) -> DdpResults:
    nbytes = ddp_models.nbytes(spec.model)
    simulated = spec.model in ddp_models.ARCHITECTURES
    payload_rate = lab.payload_rate() if lab.mbit else None
    batch = ddp_models.workload(spec.model, spec.compute_s).batch
    return DdpResults(
        time=results.now(),
        machine=results.machine(),
        command=results.command("bench.ddp"),
        environment=results.environment(),
        load=load,
        mbit=lab.mbit,
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
        raise argparse.ArgumentTypeError(f"write a duration such as 300ms or 0.3s, not {text!r}")
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ddp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=ddp_models.MODELS, default="resnet50", help="what to train (resnet50)")
    add("--workers", type=int, default=4, help="ranks, each on a host (4)")
    pools = parser.add_mutually_exclusive_group()
    pools.add_argument("--reducers", type=int, default=4, help="on hosts of their own (4)")
    pools.add_argument("--embedded", action="store_true", help="every rank hosts a reducer")
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--mbit", type=float, default=1000, help="rate of every link (1000)")
    links.add_argument("--unshaped", action="store_true", help="links as fast as the machine is")
    links.add_argument("--loopback", action="store_true", help="no hosts, no links, no root")
    add(
        "--compute",
        type=_seconds,
        default=0.1,
        help="forward and backward time of a simulated model, such as 300ms (100ms)",
    )
    add(
        "--gloo-caps",
        type=int,
        nargs="+",
        default=GLOO_CAPS_MB,
        metavar="MB",
        help="bucket_cap_mb of Gloo's variants (25, which is DDP's default, and 64, which is ours)",
    )
    add("--steps", type=int, default=2, help="of a variant in a round (2)")
    add("--rounds", type=int, default=5, help="5 or more for figures that mean something (5)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--plot", type=Path, metavar="FILE", help="draw them")
    add("--check", action="store_true", help="exit 1 if a bar is not reached")
    return parser


if __name__ == "__main__":
    sys.exit(main())
