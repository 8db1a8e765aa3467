"""What a network with faults does to a job: results stay exact, and no step or peer is lost.

    python -m torture.faults --count 300

bench/README.md says what is done, and defines every option and figure.
"""

import math
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bench import options
from lab import Lab
from torture import fault_cases
from torture.fault_cases import MBIT, REDUCERS, WORKERS, Row, Scene, stage

CASES: dict[str, Callable[[Scene, int], Row]] = {
    "healthy": fault_cases.healthy,
    "loss": fault_cases.loss,
    "slow": fault_cases.slow,
    "reducer-pulled": fault_cases.pulled,
    "rank-pulled": fault_cases.rank_pulled,
    "partition": lambda scene, count: fault_cases.partition(scene, count, "both"),
    "partition-in": lambda scene, count: fault_cases.partition(scene, count, "in"),
    "partition-out": lambda scene, count: fault_cases.partition(scene, count, "out"),
}
HEADING = (
    f"{'case':<20} {'all-reduces':>11} {'wrong':>6} {'errors':>6} {'false deaths':>12} "
    f"{'stall s':>8} {'known s':>8} {'back s':>7} {'MB/s':>7}"
)


def main(
    count: Annotated[int, typer.Option(min=30, help="All-reduces in each case.")] = 300,
    cases: Annotated[str, typer.Option(help="Which, of those that it prints.")] = ",".join(CASES),
) -> None:
    """Bring every fault upon a job, and print what became of it."""
    names = [name.strip() for name in cases.split(",")]
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(CASES)}")
    print(HEADING)
    good = True
    with options.command("torture.faults"), Lab(WORKERS + REDUCERS, MBIT) as lab:
        for name in names:
            with stage(lab) as scene:
                row = CASES[name](scene, count)
            print(line(row), *(f"#   {note}" for note in row.notes), sep="\n", flush=True)
            good = good and row.good
    sys.exit(int(not good))


def line(row: Row) -> str:
    return (
        f"{row.case:<20} {row.all_reduces:>11} {row.wrong:>6} {row.errors:>6} "
        f"{row.false_deaths:>12} {row.stall_s:>8.3f} {_figure(row.detected_s):>8} "
        f"{_figure(row.back_s):>7} {row.rate:>7.2f}"
    )


def _figure(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds:.3f}"


if __name__ == "__main__":
    typer.run(main)
