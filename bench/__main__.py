"""A short run of every benchmark, and one page of all results: ``python -m bench``.

It takes less than three minutes on 2 cores. Every command is printed before it is run, to be
repeated with other options; README.md says what each measures.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lab import Lab, LabUnavailable

RESULTS = Path("bench/results")


class Step(NamedTuple):
    """One benchmark.

    Attributes:
        name: of its files.
        shaped: whether it needs hosts with links of their own, and so root.
        outputs: options for its files; ``{0}`` is their path without suffix.
    """

    name: str
    command: str
    shaped: bool = False
    outputs: str = "--json {0}.json --plot {0}.png"


STEPS = [
    Step(
        "allreduce-shaped",
        "bench.allreduce --workers 4 --reducers 4 --mbit 1000 --sizes 4KiB,256KiB,4MiB,64MiB "
        "--baselines gloo --rounds 3",
        shaped=True,
    ),
    Step(
        "allreduce-unshaped",
        "bench.allreduce --unshaped --workers 4 --embedded --sizes 4KiB,256KiB,4MiB,64MiB "
        "--baselines gloo --rounds 3",
    ),
    Step(
        "micro",
        "pytest --benchmark-only bench/micro --benchmark-max-time 0.2 --benchmark-min-rounds 5",
        outputs="--benchmark-json {0}.json",
    ),
    Step(
        "ddp-shaped",
        "bench.ddp --workers 4 --reducers 4 --mbit 1000 --gloo-caps 25 --rounds 2",
        shaped=True,
    ),
    Step("soak", "torture.soak --count 4000 --samples 80"),
    Step(
        "nccl",
        "bench.nccl --unshaped --workers 2 --reducers 2 --calls 100 --rounds 1",
        outputs="",
    ),
]


def main() -> int:
    """Run all steps that can run here; return 1 if one of them failed."""
    argparse.ArgumentParser(prog="python -m bench", description=__doc__).parse_args()
    start = time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    obstacle = why_unshaped()
    if obstacle:
        print(f"# links cannot be shaped, only the unshaped part is run: {obstacle}")
    files, failed = [], []
    for step in STEPS:
        if step.shaped and obstacle:
            continue
        file = RESULTS / f"{step.name}.json"
        file.unlink(missing_ok=True)
        if run(f"{step.command} {step.outputs.format(file.with_suffix(''))}"):
            failed.append(step.name)
        if file.exists():
            files.append(str(file))
    if files and run(f"bench.report {' '.join(files)} -o {RESULTS / 'report.html'}"):
        failed.append("report")
    print(f"# {time.monotonic() - start:.0f} s; failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


def run(command: str) -> int:
    print(f"\npython -m {command}", flush=True)
    return subprocess.run([sys.executable, "-m", *shlex.split(command)], check=False).returncode


def why_unshaped() -> str:
    """Say why there can be no hosts with links of their own; nothing if there can."""
    if not shutil.which("iperf3"):
        return "iperf3, which measures what a link carries, is missing: install the package iperf3"
    try:
        with Lab(hosts=2, mbit=1000):
            return ""
    except LabUnavailable as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
