"""Checkouts of this project side by side in one run, which tells whether a change costs time.

    python -m bench.versus before=../before after=.

README.md defines every option and figure.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import options, report
from bench.contenders import Contender
from bench.contest import Contest, hosts_needed
from harness import ROOT, HarnessError
from lab import LabUnavailable

SAMPLES = 2000  # of the bootstrap


@dataclass(frozen=True)
class Checkout(Contender):
    """A pool, and workers, of one checkout.

    Attributes:
        label: what it is called.
        path: where it is; its extensions are compiled in place.
    """

    label: str = ""
    path: Path = ROOT

    @property
    def name(self) -> str:
        """What it is called."""
        return self.label

    @property
    def pool(self) -> str:
        """What it is called: it has reducers of its own."""
        return self.label

    @property
    def root(self) -> Path:
        """Where it is."""
        return self.path


def main(  # noqa: PLR0917 (options have names on the command line)
    checkouts: Annotated[list[str], typer.Argument(help="NAME=DIR each, the first to compare to.")],
    workers: Annotated[int, typer.Option(min=2, help="Ranks, each on a host of its own.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers on hosts of their own.")] = 4,
    mbit: Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")] = 1000.0,
    unshaped: Annotated[
        bool, typer.Option("--unshaped", help="Loopback without shaping: the CPU is the limit.")
    ] = False,
    sizes: Annotated[str, typer.Option(help="Bytes per rank.")] = "4KiB,1MiB,64MiB",
    iterations: Annotated[str, typer.Option(help="All-reduces per round, or auto.")] = "auto",
    rounds: Annotated[int, typer.Option(min=3, help="How often each has its turn.")] = 40,
) -> None:
    """Compare all-reduces of checkouts in one run, alternating, and print ratios of times."""
    contenders = [checkout(text, reducers) for text in checkouts]
    options.begin("bench.versus")
    try:
        with (
            options.lab(hosts_needed(workers, contenders), None if unshaped else mbit) as lab,
            Contest(lab, workers, contenders) as contest,
        ):
            for nbytes in options.sizes(sizes):
                rows = contest.measure(
                    nbytes, rounds=rounds, iterations=options.iterations(iterations)
                )
                if contest.skipped or any(row.wrong for row in rows):
                    wrong = {row.contender: row.wrong for row in rows}
                    sys.exit(f"bench.versus: {contest.skipped or f'wrong elements: {wrong}'}")
                for row in rows:
                    low, middle, high = ratio(rows[0].rounds_us, row.rounds_us)
                    print(
                        f"{report.size(nbytes)} {row.contender}: {row.time_us:.1f} us, "
                        f"{middle:.3f} of {rows[0].contender} ({low:.3f} to {high:.3f}), "
                        f"{row.worker_cpu_s_per_gb:.3f} s of a worker's processor per GB",
                        flush=True,
                    )
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"bench.versus: {error}")


def checkout(text: str, reducers: int) -> Checkout:
    """Return what ``NAME=DIR`` says.

    Raises:
        typer.BadParameter: it says something else, or there is no checkout.
    """
    label, _, path = text.partition("=")
    root = Path(path).resolve()
    if not (label and path and (root / "worker_client").is_dir()):
        raise typer.BadParameter(f"write NAME=DIR with a checkout's directory, not {text!r}")
    return Checkout("pool", reducers, label=label, path=root)


def ratio(first: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios of times between its 95 % bounds, by bootstrap."""
    ratios = np.divide(other, first)
    samples = np.random.default_rng(0).choice(ratios, (SAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return float(low), float(np.median(ratios)), float(high)


if __name__ == "__main__":
    typer.run(main)
