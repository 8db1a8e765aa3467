"""Whole all-reduces: ours, Gloo, MPI and a ring, side by side in one run.

    python -m bench.allreduce --workers 8 --reducers 8 --mbit 400

README.md defines every option and figure.
"""

import sys
from typing import Annotated

import typer

from bench import options, report, results


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: options.Workers = 8,
    reducers: Annotated[
        str, typer.Option(help="Reducers on hosts of their own, such as 8 or 4,8. [default: 8]")
    ] = "",
    embedded: options.Embedded = False,
    mixed: Annotated[
        int, typer.Option(min=0, help="Ours with this many reducers and one in every rank.")
    ] = 0,
    wire: Annotated[
        str, typer.Option(help="Each pool also with these on the wire, of bf16, fp16 and int8.")
    ] = "",
    keys: Annotated[
        bool, typer.Option("--keys", help="Each pool also with keys: encrypted.")
    ] = False,
    mbit: options.Mbit = 400.0,
    round_trip_ms: options.RoundTripMs = 0.0,
    loss_percent: options.LossPercent = 0.0,
    congestion: options.Congestion = results.NEAR.congestion,
    port_buffer: Annotated[
        str, typer.Option(help="Of the switch's port to each host. [default: a long queue]")
    ] = "",
    streams: Annotated[
        int, typer.Option(min=1, help="Connections of iperf3, for the payload rate.")
    ] = 1,
    unshaped: options.Unshaped = False,
    sizes: options.Sizes = options.SIZES,
    baselines: options.Baselines = "gloo,mpi,ring",
    iterations: options.Iterations = "auto",
    rounds: options.Rounds = 5,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Compare all-reduces in one run, alternating, and print medians."""
    contenders = options.ours(workers, reducers, embedded, mixed, wire, keys=keys)
    contenders += options.baselines(baselines)
    columns = report.all_reduce_columns(each.name for each in contenders if not each.ours)
    distance = results.Distance(
        round_trip_ms=round_trip_ms,
        loss_percent=loss_percent,
        congestion=congestion,
        port_bytes=options.sizes(port_buffer)[0] if port_buffer else 0,
    )
    found = options.begin_all_reduces(
        "allreduce",
        None if unshaped else mbit,
        [workers],
        rounds,
        distance=distance,
        streams=streams,
    )
    rate = found.settings.mbit
    with (
        options.command("bench.allreduce"),
        options.contest(workers, contenders, rate, distance, streams=streams) as contest,
    ):
        found.settings.skipped = contest.skipped
        found.settings.payload_rates += contest.payload_rates
        print(f"# {report.conditions(found.settings)}")
        print(report.heading(columns))
        for nbytes in options.sizes(sizes):
            rows = contest.measure(nbytes, rounds=rounds, iterations=options.iterations(iterations))
            for row in rows:
                print(report.line(columns, row), flush=True)
            found.rows += rows
    sys.exit(options.finish(found, json, plot))


if __name__ == "__main__":
    typer.run(main)
