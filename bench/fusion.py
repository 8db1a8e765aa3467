"""What fusion gains: many small tensors, submitted in another order at every rank.

    python -m bench.fusion --workers 4 --mbit 400

README.md defines every option and figure.
"""

from statistics import median
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter

from bench import options
from harness.ranks import training

PATIENCE_S = 600.0
NAMES = {"one": "all bytes as one tensor", "waits": "one after the other"}


def main(  # noqa: PLR0917 (options have names on the command line)
    workers: Annotated[int, typer.Option(min=2, help="Ranks.")] = 4,
    reducers: Annotated[int, typer.Option(min=1, help="Reducers.")] = 4,
    mbit: options.Mbit = 400.0,
    unshaped: options.Unshaped = False,
    tensors: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    size: Annotated[str, typer.Option(help="Bytes of each.")] = "4KiB",
    thresholds: Annotated[
        str, typer.Option(help="Of fusion, in bytes; 0 packs nothing.")
    ] = "0,16KiB,256KiB,64MiB",
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Every rank submits in an order of its own.")
    ] = False,
    rounds: options.Rounds = 5,
    json: options.Json = None,
) -> None:
    """Compare thresholds of fusion in one run, alternating, and print medians."""
    (nbytes,) = options.sizes(size)
    each = [int(one) for one in TypeAdapter(list[ByteSize]).validate_python(thresholds.split(","))]
    arguments = {"tensors": tensors, "nbytes": nbytes, "thresholds": each}
    arguments |= {"shuffle": shuffle, "rounds": rounds}
    run = options.begin("bench.fusion")
    with (
        options.command("bench.fusion"),
        options.lab(workers + reducers, None if unshaped else mbit) as lab,
        training(lab, workers, "bench.fusion_rank", arguments) as ranks,
    ):
        said = ranks.hear_all(PATIENCE_S)
        ranks.tell("done")
    where = "loopback, unshaped" if unshaped else f"links of {mbit:g} Mbit/s"
    print(f"# {tensors} tensors of {nbytes} bytes, {workers} ranks, {reducers} reducers, {where}")
    # A way has ended when the last rank has all; ranks begin together.
    seconds = {
        way: [max(one["seconds"][way][at] for one in said) for at in range(rounds)]
        for way in said[0]["seconds"]
    }
    one, waits = median(seconds["one"]), median(seconds["waits"])
    rows: list[dict[str, str | float]] = []
    print(f"{'way':>24} {'median ms':>10} {'of one':>8} {'gain':>7}")
    for way, times in seconds.items():
        taken = median(times)
        name = NAMES.get(way) or f"threshold {int(way)}"
        print(f"{name:>24} {1e3 * taken:>10.1f} {taken / one:>8.2f} {waits / taken:>7.2f}")
        rows.append({"way": name, "ms": 1e3 * taken, "one": taken / one, "waits": waits / taken})
    options.write_table(run, rows, json)


if __name__ == "__main__":
    typer.run(main)
