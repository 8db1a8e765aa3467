"""Whole all-reduces: ours, Gloo, MPI and a ring, side by side in one run.

    python -m bench.allreduce --workers 8 --reducers 8 --mbit 400

README.md defines every option and figure.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench import options, report, results
from bench.contest import Contest, hosts_needed
from harness import HarnessError
from lab import LabUnavailable


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(min=2, help="Ranks, each on a host of its own.")] = 8,
    reducers: Annotated[
        str, typer.Option(help="Reducers on hosts of their own, such as 8 or 4,8. [default: 8]")
    ] = "",
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Ours without reducers: ranks host them.")
    ] = False,
    mixed: Annotated[
        int, typer.Option(min=0, help="Ours with this many reducers and one in every rank.")
    ] = 0,
    wire: Annotated[
        str, typer.Option(help="Each pool also with these on the wire, of bf16, fp16 and int8.")
    ] = "",
    keys: Annotated[
        bool, typer.Option("--keys", help="Each pool also with keys: encrypted.")
    ] = False,
    mbit: Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")] = 400.0,
    round_trip_ms: Annotated[
        float, typer.Option(help="Between two hosts; 0 for what the kernel takes.")
    ] = 0.0,
    loss_percent: Annotated[float, typer.Option(help="Packets that are lost on the way.")] = 0.0,
    congestion: Annotated[
        str, typer.Option(help="How TCP chooses its rate, such as bbr.")
    ] = results.NEAR.congestion,
    streams: Annotated[
        int, typer.Option(min=1, help="Connections of iperf3, for the payload rate.")
    ] = 1,
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
    plot: Annotated[Path | None, typer.Option(help="File for a picture (PNG).")] = None,
) -> None:
    """Compare all-reduces in one run, alternating, and print medians."""
    contenders = options.ours(workers, reducers, embedded, mixed, wire, keys=keys)
    contenders += options.baselines(baselines)
    columns = report.all_reduce_columns(each.name for each in contenders if not each.ours)
    distance = results.Distance(
        round_trip_ms=round_trip_ms, loss_percent=loss_percent, congestion=congestion
    )
    found = options.begin_all_reduces(
        "allreduce",
        None if unshaped else mbit,
        [workers],
        rounds,
        distance=distance,
        streams=streams,
    )
    hosts = hosts_needed(workers, contenders)
    try:
        with (
            options.lab(hosts, found.settings.mbit, distance) as lab,
            Contest(lab, workers, contenders, streams=streams) as contest,
        ):
            found.settings.skipped = contest.skipped
            found.settings.payload_rates += contest.payload_rates
            print(f"# {report.conditions(found.settings)}")
            print(report.heading(columns))
            for nbytes in options.sizes(sizes):
                rows = contest.measure(
                    nbytes, rounds=rounds, iterations=options.iterations(iterations)
                )
                for row in rows:
                    print(report.line(columns, row), flush=True)
                found.rows += rows
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"bench.allreduce: {error}")
    sys.exit(options.finish(found, json, plot))


if __name__ == "__main__":
    typer.run(main)
