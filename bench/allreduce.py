"""Whole all-reduces: ours, Gloo, MPI and a ring, side by side in one run.

    python -m bench.allreduce --workers 8 --reducers 8 --mbit 400

README.md defines every option and figure.
"""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (typer reads it)
from typing import TYPE_CHECKING, Annotated

import typer

from bench import options, results, tables
from bench.contest import Contest, hosts_needed
from bench.crew import CrewError
from bench.lab import LabUnavailable

if TYPE_CHECKING:
    from bench.results import Row


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(min=2, help="Ranks, each on a host of its own.")] = 8,
    reducers: Annotated[
        str, typer.Option(help="Reducers on hosts of their own, such as 8 or 4,8. [default: 8]")
    ] = "",
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Ours without reducers: ranks host them.")
    ] = False,
    mixed: Annotated[
        int, typer.Option(min=0, help="Ours with this many reducers and one beside every rank.")
    ] = 0,
    mbit: Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")] = 400.0,
    unshaped: Annotated[
        bool, typer.Option("--unshaped", help="Loopback without shaping: the CPU is the limit.")
    ] = False,
    sizes: Annotated[str, typer.Option(help="Bytes per rank.")] = options.SIZES,
    baselines: Annotated[
        str, typer.Option(help="Of gloo, mpi and ring; empty for none.")
    ] = "gloo,mpi,ring",
    iterations: Annotated[str, typer.Option(help="All-reduces per round, or auto.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="How often each has its turn.")] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
) -> None:
    """Compare all-reduces in one run, alternating, and print medians."""
    contenders = options.ours(workers, reducers, embedded, mixed) + options.baselines(baselines)
    try:
        with (
            options.lab(hosts_needed(workers, contenders), None if unshaped else mbit) as lab,
            Contest(lab, workers, contenders) as contest,
        ):
            _say_conditions(contest, lab.mbit)
            rows: list[Row] = []
            names = [contender.name for contender in contenders if not contender.ours]
            print(tables.heading(names))
            for nbytes in options.sizes(sizes):
                fresh = contest.measure(
                    nbytes, rounds=rounds, iterations=options.iterations(iterations)
                )
                for row in fresh:
                    print(tables.line(row, names), flush=True)
                rows += fresh
            found = results.Results(
                kind="allreduce",
                time=results.now(),
                machine=results.machine(),
                settings=results.Settings(
                    command=results.command("bench.allreduce"),
                    mbit=lab.mbit,
                    payload_rate=contest.payload_rate,
                    workers=[workers],
                    rounds=rounds,
                    environment=results.environment(),
                    skipped=contest.skipped,
                ),
                rows=rows,
            )
    except (CrewError, LabUnavailable) as error:
        sys.exit(f"bench.allreduce: {error}")
    _finish(found, json)


def _say_conditions(contest: Contest, mbit: float | None) -> None:
    if mbit is None:
        print("# links are not shaped: processors are the limit")
    else:
        rate = (contest.payload_rate or 0.0) / 1e6
        print(f"# links of {mbit:g} Mbit/s each way; iperf3 reaches {rate:.2f} MB/s of payload")


def _finish(found: results.Results, json: Path | None) -> None:
    for name, reason in found.settings.skipped.items():
        print(f"# {name} was not measured: {reason}")
    if json:
        found.write(json)
    if any(row.wrong for row in found.rows) or not any(row.ours for row in found.rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
