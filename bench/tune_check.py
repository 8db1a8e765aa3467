"""Whether ``auto`` keeps up with the best chunk and window that one could set.

    sudo python -m bench.tune_check --mbit 1000

README.md defines every option and figure.
"""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from bench import options, report
from bench.contenders import Contender
from bench.versus import ratio


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: options.Workers = 4,
    reducers: Annotated[
        int, typer.Option(min=0, help="Reducers on hosts of their own; 0: ranks host them.")
    ] = 4,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    sizes: Annotated[
        str, typer.Option(help="Bytes per rank; A+B: in turn, A&B and NxA: begun together.")
    ] = "4KiB,256KiB,1MiB,64MiB,64B+64MiB,1MiB&24x4MiB,32x4KiB",
    chunks: Annotated[str, typer.Option(help="Sizes to set.")] = "64KiB,256KiB,1MiB",
    windows: Annotated[str, typer.Option(help="Sizes to set, each with each.")] = "2MiB,8MiB,16MiB",
    iterations: options.Iterations = "auto",
    rounds: Annotated[int, typer.Option(min=3, help="How often each has its turn.")] = 7,
    least: Annotated[float, typer.Option(help="What is enough, of the best one's speed.")] = 0.98,
) -> None:
    """Compare ``auto`` with settings of chunk and window in one run, alternating."""
    auto = Contender("pool", reducers) if reducers else Contender("embedded")
    fixed = [
        replace(auto, chunk=chunk, window=window)
        for chunk in chunks.split(",")
        for window in windows.split(",")
    ]
    options.begin("bench.tune_check")
    behind = []
    rate, each = None if unshaped else mbit, options.iterations(iterations)
    with (
        options.command("bench.tune_check"),
        options.contest(workers, [auto, *fixed], rate) as contest,
    ):
        for size in options.steps(sizes):
            mine, *others = contest.measure(size, rounds=rounds, iterations=each)
            name = report.size(size) if isinstance(size, int) else size.name
            wrong = {row.contender: row.wrong for row in (mine, *others) if row.wrong}
            if contest.skipped or wrong:
                sys.exit(f"bench.tune_check: {contest.skipped or f'wrong elements: {wrong}'}")
            found = {row.contender: ratio(mine.rounds_us, row.rounds_us) for row in others}
            best = min(found, key=lambda name: found[name][1])
            low, speed, high = found[best]
            print(
                f"{name}: auto takes {mine.time_us:.1f} us, "
                f"{speed:.3f} of the speed of {best} ({low:.3f} to {high:.3f})",
                flush=True,
            )
            behind += [name] * (speed < least)
    if behind:
        sys.exit(f"bench.tune_check: auto is below {least:g} of the best at {', '.join(behind)}")


if __name__ == "__main__":
    typer.run(main)
