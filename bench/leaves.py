"""What sums of leaves cost beside sums over ranks.

    python -m bench.leaves --workers 4 --counts 4,24

README.md defines every option and figure.
"""

from statistics import median
from typing import Annotated

import typer

from bench import options
from harness.ranks import training
from reducer.wire.leaves import parts

PATIENCE_S = 600.0


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(min=2, help="Ranks.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 4,
    mbit: options.Mbit = 1000.0,
    unshaped: options.Unshaped = False,
    sizes: options.Sizes = "4KiB,1MiB,64MiB",
    counts: Annotated[str, typer.Option(help="Leaves of a step, of each way.")] = "4,24",
    rounds: options.Rounds = 9,
    json: options.Json = None,
) -> None:
    """Compare sums over ranks and over leaves in one run, alternating, and print medians."""
    leaves = [int(one) for one in counts.split(",")]
    arguments = {"sizes": options.sizes(sizes), "counts": leaves, "rounds": rounds}
    run = options.begin("bench.leaves")
    with (
        options.command("bench.leaves"),
        options.lab(workers + reducers, None if unshaped else mbit) as lab,
        training(lab, workers, "bench.leaves_rank", arguments) as ranks,
    ):
        said = ranks.hear_all(PATIENCE_S)
        ranks.tell("done")
    where = "loopback, unshaped" if unshaped else f"links of {mbit:g} Mbit/s"
    print(f"# {workers} ranks, {reducers} reducers, {where}; a call has ended with the last rank")
    rows: list[dict[str, str | float]] = []
    print(
        f"{'bytes':>10} {'leaves':>7} {'buffers':>8} {'median ms':>10} {'of a sum over ranks':>20}"
    )
    for nbytes, ways in said[0]["seconds"].items():
        taken = {
            way: median(
                max(one["seconds"][nbytes][way][at] for one in said) for at in range(rounds)
            )
            for way in ways
        }
        for way, seconds in taken.items():
            sent = 1.0
            if count := int(way):
                sent = sum(len(parts(count, workers, rank)) for rank in range(workers)) / workers
            ratio = seconds / taken["0"]
            print(f"{nbytes:>10} {way:>7} {sent:>8.2f} {1e3 * seconds:>10.3f} {ratio:>20.3f}")
            row = {"bytes": nbytes, "leaves": way, "buffers": sent, "ms": 1e3 * seconds}
            rows.append({**row, "ratio": ratio})
    options.write_table(run, rows, json)


if __name__ == "__main__":
    typer.run(main)
