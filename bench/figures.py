"""Measures what docs/performance.md and the README say: ``python -m bench.figures [NAME...]``.

Each figure is a command, and a file docs/figures/NAME.json of what it has measured, of which
docs/generate.py makes tables. Without a name it lists the figures.
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report, results
from bench.results import DdpResults, DdpRow, Results, Row, Run, TableResults
from harness import ROOT

FILES = ROOT / "docs" / "figures"
_SIZES = "--sizes 4KiB,64KiB,256KiB,1MiB,4MiB,64MiB"
_LARGE = "--sizes 64MiB --baselines gloo"
_BOTH = "--baselines gloo,mpi,mpi-ring,mpi-segmented"
_EQUAL = '--workers 2,4,8,16 --reducers "" --no-embedded --mbit 100'
FIGURES = {
    "pool-4": f"bench.allreduce --workers 4 --reducers 4 --embedded --mbit 1000 {_SIZES} {_BOTH}",
    "pool-8": f"bench.allreduce --workers 8 --reducers 8 --mbit 400 {_SIZES} {_BOTH}",
    "pool-2": f"bench.allreduce --workers 2 --reducers 2 --mbit 1000 {_LARGE}",
    "mixed": f"bench.allreduce --workers 4 --reducers 2 --mixed 2 --mbit 1000 {_LARGE}",
    "loopback-4": "bench.allreduce --unshaped --workers 4 --reducers 4 --embedded "
    f"{_SIZES} --baselines gloo",
    "loopback-2": "bench.allreduce --unshaped --workers 2 --reducers 2 --embedded "
    "--sizes 1MiB,64MiB --baselines gloo",
    "cards-pool": f"bench.allreduce --workers 4 --reducers 4 --mbit 400 {_LARGE}",
    "cards-ring": f"bench.allreduce --workers 4 --embedded --mbit 800 {_LARGE}",
    "ddp": "bench.ddp --workers 4 --reducers 4 --mbit 1000 --model resnet50",
    "scaling-16": f"bench.scaling {_EQUAL} --size 16MiB --rounds 3",
    "scaling-64": f"bench.scaling {_EQUAL} --size 64MiB --rounds 3",
    "nodes": "bench.hierarchy --nodes 2 --local 4 --mbit 100",
    "plan": "bench.simulated --figures --within 1",
    "small-1000": "bench.fusion --mbit 1000 --rounds 11 --thresholds 0,64MiB",
    "small-400": "bench.fusion --mbit 400 --rounds 11 --thresholds 0,64MiB",
    "keys": "bench.allreduce --workers 4 --reducers 4 --keys --mbit 1000 "
    "--sizes 4KiB,1MiB,64MiB --baselines gloo",
    "wire-4": f"bench.allreduce --workers 4 --reducers 4 --wire bf16,int8 --mbit 1000 {_LARGE}",
    "wire-8": f"bench.allreduce --workers 8 --reducers 8 --wire bf16,int8 --mbit 400 {_LARGE}",
    "hivemind-1000": "bench.hivemind --workers 4 --mbit 1000",
    "nccl": "bench.nccl --workers 4 --reducers 4 --mbit 1000",
    "sites": "bench.sites --steps 2000 --kinds ddp,diloco --rounds 3",
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Of figures; none: a list.")] = None,
) -> None:
    """Measure figures one after the other, and write the file of each."""
    for name, command in FIGURES.items() if not names else ():
        print(f"{name:13} python -m {command}")
    if unknown := set(names or ()) - set(FIGURES):
        raise typer.BadParameter(f"no figure is called {', '.join(sorted(unknown))}")
    if names and results.machine().commit.endswith("+"):
        sys.exit(
            "bench.figures: a figure names the commit it was measured at: commit your changes first"
        )
    for name in names or ():
        begun = time.monotonic()
        measure(name)
        print(f"# {name} took {time.monotonic() - begun:.0f} s", flush=True)


def measure(name: str) -> None:
    """Run a figure's command, and write its file; end where it failed, or the machine was busy."""
    print(f"\npython -m {FIGURES[name]}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", *shlex.split(FIGURES[name]), "--json", str(path)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"bench.figures: {name} failed")
        table = json.loads(path.read_text())["kind"] == "table"
        found = TableResults.model_validate_json(path.read_text()) if table else results.read(path)
    assert isinstance(found, Run)
    if isinstance(found, Results) and found.settings.skipped:
        sys.exit(f"bench.figures: {name} is no figure, as some were not measured")
    if warning := results.busy(found.load, found.machine.cores):
        sys.exit(f"bench.figures: {name} is no figure: {warning}")
    (FILES / f"{name}.json").write_text(text(name, found))


def text(name: str, found: Run) -> str:
    """Return a figure's file: where it comes from, and a line for each row."""
    machine = found.machine
    memory = round(machine.memory_bytes / (1 << 30))
    said = {
        "commit": machine.commit,
        "date": found.time.date().isoformat(),
        "command": f"python -m {FIGURES[name]}",
        "machine": f"{machine.cores} cores of {machine.cpu}, {memory} GiB",
    }
    head = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in said.items()]
    rows = [f"  {json.dumps(_rounded(row))}" for row in _rows(found)]
    return "\n".join(["{", *head, ' "rows": [', ",\n".join(rows), " ]", "}", ""])


def _rows(found: Run) -> Iterator[dict[str, Any]]:
    if isinstance(found, TableResults):
        yield from found.rows
    elif isinstance(found, DdpResults):
        yield _training(found)
    elif isinstance(found, Results):
        for row in found.rows:
            alike = [
                other
                for other in found.rows
                if (other.workers, other.nbytes) == (row.workers, row.nbytes) and not other.ours
            ]
            yield _all_reduce(row, alike)


def _all_reduce(row: Row, rivals: list[Row]) -> dict[str, Any]:
    """Return what pages say of a row: us, shares of what links carry, seconds for each GB."""
    said = {
        "way": row.contender,
        "workers": row.workers,
        "reducers": row.reducers,
        "size": report.size(row.nbytes, " "),
        "us": row.time_us,
        "mean_us": row.mean_us,
        "payload": row.payload_share,
        "limit": row.algbw / row.limit if row.limit else None,
        "cpu": row.worker_cpu_s_per_gb,
        "reducers_cpu": row.reducer_cpu_s_per_gb,
    }
    for kind in ("gloo", "mpi") if row.ours else ():
        same = [rival for rival in rivals if rival.contender.startswith(kind)]
        if same:
            fastest = min(same, key=lambda rival: rival.time_us)
            said[kind] = _faster(row.rounds_us, fastest.rounds_us)
            said |= {f"{kind}_way": fastest.contender} if fastest.contender != kind else {}
    return {key: value for key, value in said.items() if value is not None}


def _faster(ours: list[float], others: list[float]) -> list[float]:
    """Return how many times as fast we are: the median, the lowest and the highest round."""
    ratios = [other / own for own, other in zip(ours, others, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def _training(found: DdpResults) -> dict[str, Any]:
    ours, *others = [row for row in found.rows if row.variant != "no-op"]
    gloo: DdpRow = max(others, key=lambda row: row.samples_per_s)
    return {
        "way": found.model,
        "workers": found.workers,
        "reducers": found.reducers,
        "samples": ours.samples_per_s,
        "gloo_samples": gloo.samples_per_s,
        "gloo": _faster(ours.rounds_ms, gloo.rounds_ms),
        "exposed": ours.exposed_over_ideal,
    }


def _rounded(value: Any) -> Any:
    """Return a figure with four digits, and so those of a list or a row."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    typer.run(main)
