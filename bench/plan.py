"""What `reducer plan` predicts, beside what the lab measures.

    python -m bench.plan --workers 2,4,8 --reducers 1,2,4,8 --mbit 100 --size 16MiB

The prediction knows the links' rate and nothing that was measured. README.md defines every option
and figure.
"""

import sys
from typing import Annotated

import typer

from bench import options
from bench.contenders import Contender
from bench.results import Row
from lab.network import BURST_BYTES
from reducer.planning import network_model, plan

HEADING = (
    f"{'n':>3} {'k':>3} {'topology':>9} {'size':>8} {'predicted':>10} {'measured':>10} {'error':>7}"
)


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8",
    reducers: Annotated[str, typer.Option(help="Sizes of the pool.")] = "1,2,4,8",
    size: Annotated[str, typer.Option(help="Bytes per rank, such as 4MiB,16MiB.")] = "16MiB",
    mbit: options.Mbit = 100.0,
    embedded: options.AlsoEmbedded = True,
    mixed: Annotated[
        bool, typer.Option(help="Pools smaller than n beside reducers in ranks, too.")
    ] = True,
    rounds: options.Rounds = 3,
    within: Annotated[float, typer.Option(help="Error from which on the exit code is 1.")] = 0.1,
    json: options.Json = None,
) -> None:
    """Predict and measure all-reduces over a grid, and print the errors."""
    sizes, pools, ranks = options.sizes(size), options.counts(reducers), options.counts(workers)
    run = options.begin("bench.plan")
    found: list[Row] = []
    print(HEADING + "\n" + f"{'ms':>37} {'ms':>10} {'%':>7}")
    for n in ranks:
        contenders = [Contender("pool", k) for k in pools]
        contenders += [Contender("mixed", k) for k in pools if mixed and k < n]
        contenders += [Contender("embedded")] if embedded else []
        with options.command("bench.plan"), options.contest(n, contenders, mbit) as contest:
            for nbytes in sizes:
                rows = contest.measure(nbytes, rounds=rounds)
                found += rows
                for row in rows:
                    show(row, mbit)
            if contest.skipped:
                sys.exit(f"bench.plan: not measured: {contest.skipped}")
    errors = [error(row, mbit) for row in found]
    table: list[dict[str, str | float]] = [
        {"workers": row.workers, "reducers": row.reducers, "way": row.contender, "error": off}
        for row, off in zip(found, errors, strict=True)
    ]
    options.write_table(run, table, json)
    worst = max(map(abs, errors))
    print(f"# largest error {worst:.1%}; links of {mbit:g} Mbit/s, nothing else predicted from")
    sys.exit(int(worst > within))


def show(row: Row, mbit: float) -> None:
    predicted_us, off = 1e6 * predict(row, mbit), 100 * error(row, mbit)
    topology = row.contender.partition("-")[0]
    cells = f"{row.workers:>3} {row.reducers:>3} {topology:>9} {row.nbytes:>8}"
    print(f"{cells} {predicted_us / 1e3:>10.1f} {row.time_us / 1e3:>10.1f} {off:>+7.1f}")


def error(row: Row, mbit: float) -> float:
    """Return the relative error of what is predicted."""
    return 1e6 * predict(row, mbit) / row.time_us - 1


def predict(row: Row, mbit: float) -> float:
    """Return what the plan says of a row's all-reduce, seconds."""
    gbps = mbit / 1000
    job = plan.PlannedJob(row.workers, gbps, gbps, row.nbytes)
    topology: network_model.Topology = "pool"
    if row.contender == "embedded":
        topology = "embedded"
    elif row.contender.startswith("mixed"):
        topology = "mixed"
    times = network_model.card_times(row.nbytes, row.workers, row.reducers, topology, job.network)
    # The lab's shaper lets a link that has rested catch up, as far as its burst goes.
    caught_up = BURST_BYTES / job.network.worker_rate
    return times.busy_s + max(0.0, times.idle_s - caught_up)


if __name__ == "__main__":
    typer.run(main)
