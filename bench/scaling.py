"""How algbw goes with the number of workers and of reducers, at one size and link rate.

    python -m bench.scaling --workers 2,4,8,16 --reducers 1,2,4,8,16 --mbit 100 --size 16MiB

Every number of workers has a lab of its own, in which all its pools (of which smaller ones are part
of larger ones) and the embedded reducers take turns. README.md defines every option and figure.
"""

import sys
from typing import Annotated

import typer

from bench import options, report
from bench.contenders import Contender
from bench.results import Results, Row


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8,16",
    reducers: Annotated[
        str,
        typer.Option(
            help="Numbers of reducers; those above the ranks' are left out; empty: as many."
        ),
    ] = "1,2,4,8,16",
    size: Annotated[str, typer.Option(help="Bytes per rank.")] = "16MiB",
    mbit: options.Mbit = 100.0,
    unshaped: options.Unshaped = False,
    embedded: options.AlsoEmbedded = True,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Pools smaller than n beside reducers in ranks, too.")
    ] = False,
    baselines: options.Baselines = "",
    iterations: options.Iterations = "auto",
    rounds: options.Rounds = 5,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure over numbers of workers and reducers, and print medians."""
    sizes, pools, ranks = options.sizes(size), options.counts(reducers), options.counts(workers)
    if len(sizes) != 1 or min(ranks, default=0) < 2:
        raise typer.BadParameter("it takes one size, and at least 2 workers")
    others = [Contender("embedded")] if embedded else []
    others += options.baselines(baselines)
    columns = report.all_reduce_columns(each.name for each in others if not each.ours)
    found = options.begin_all_reduces("scaling", None if unshaped else mbit, ranks, rounds)
    print(report.heading(columns))
    rate, each = found.settings.mbit, options.iterations(iterations)
    for n in ranks:
        contenders = [Contender("pool", k) for k in pools or [n] if k <= n]
        contenders += [Contender("mixed", k) for k in pools if mixed and k < n]
        contenders += others
        with options.command("bench.scaling"), options.contest(n, contenders, rate) as contest:
            found.settings.payload_rates += contest.payload_rates
            rows = contest.measure(sizes[0], rounds=rounds, iterations=each)
            for name, why in contest.skipped.items():
                found.settings.skipped[f"{name}, n={n}"] = why
        for row in rows:
            print(report.line(columns, row), flush=True)
        found.rows += rows
    print(f"# {report.conditions(found.settings)}")
    for text in flatness(found):
        print(f"# {text}")
    sys.exit(options.finish(found, json, plot))


def flatness(found: Results) -> list[str]:
    """Say how much algbw is left at the most workers, of what it is at the fewest."""
    full = [row for row in found.rows if row.contender == f"pool-{row.workers}"]
    series = {"pool with k = n": full}
    for row in found.rows:
        if not row.reducers:
            series.setdefault(row.contender, []).append(row)
    return [_flatness(name, rows) for name, rows in series.items() if len(rows) > 1]


def _flatness(name: str, rows: list[Row]) -> str:
    few = min(rows, key=lambda row: row.workers)
    many = max(rows, key=lambda row: row.workers)
    text = f"{name}: algbw at n={many.workers} over n={few.workers} {many.algbw / few.algbw:.3f}"
    if few.limit and many.limit:
        text += f", links allow {many.limit / few.limit:.3f}"
    return text


if __name__ == "__main__":
    typer.run(main)
