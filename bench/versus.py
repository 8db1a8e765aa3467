"""Checkouts of this project side by side in one run, which tells whether a change costs time.

    python -m bench.versus before=../before after=.

README.md defines every option and figure.
"""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from bench import options, report
from bench.contenders import Contender

SAMPLES = 2000  # of the bootstrap


def main(  # noqa: PLR0917 (options have names on the command line)
    checkouts: Annotated[list[str], typer.Argument(help="NAME=DIR each, the first to compare to.")],
    workers: options.Workers = 4,
    reducers: options.Reducers = 4,
    embedded: options.Embedded = False,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    sizes: options.Sizes = "4KiB,1MiB,64MiB",
    iterations: options.Iterations = "auto",
    rounds: Annotated[int, typer.Option(min=3, help="How often each has its turn.")] = 40,
) -> None:
    """Compare all-reduces of checkouts in one run, alternating, and print ratios of times."""
    contenders = [checkout(text, 0 if embedded else reducers) for text in checkouts]
    options.begin("bench.versus")
    rate, each = None if unshaped else mbit, options.iterations(iterations)
    with options.command("bench.versus"), options.contest(workers, contenders, rate) as contest:
        for nbytes in options.sizes(sizes):
            rows = contest.measure(nbytes, rounds=rounds, iterations=each)
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


def checkout(text: str, reducers: int) -> Contender:
    """Return what ``NAME=DIR`` says, with so many reducers, or 0: its ranks host them.

    Raises:
        typer.BadParameter: it says something else, or there is no checkout.
    """
    label, _, path = text.partition("=")
    root = Path(path).resolve()
    if not (label and path and (root / "worker_client").is_dir()):
        raise typer.BadParameter(f"write NAME=DIR with a checkout's directory, not {text!r}")
    return Contender("pool" if reducers else "embedded", reducers, label=label, root=root)


def ratio(first: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios of times between its 95 % bounds, by bootstrap."""
    ratios = np.divide(other, first)
    samples = np.random.default_rng(0).choice(ratios, (SAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return float(low), float(np.median(ratios)), float(high)


if __name__ == "__main__":
    typer.run(main)
