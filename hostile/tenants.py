"""What a hostile job costs an honest one on the same reducer.

    python -m hostile.tenants --ranks 2 --size 4MiB --rounds 5 [--keys]

The honest job is measured alone, beside an honest second one, which is its fair share, and beside
a hostile one of each kind, in turn, several times over. bench/README.md defines every figure.
"""

import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from bench import options
from hostile import company
from hostile.intruder import JOB, TENANTS


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(help="Of each honest job.")] = 2,
    size: Annotated[str, typer.Option(help="Of a buffer.")] = "4MiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 30,
    rounds: Annotated[int, typer.Option(help="Measurements of each kind, in turn.")] = 5,
    kinds: Annotated[str, typer.Option(help="Of hostility.")] = ",".join(TENANTS),
    memory_limit: Annotated[str, typer.Option(help="Of the reducer.")] = "1GiB",
    encrypted: Annotated[
        bool, typer.Option("--keys", help="Every job has keys of its own, the hostile one too.")
    ] = False,
) -> None:
    """Measure, print a table, exit 1 if a result was wrong or a ratio above the bar."""
    (nbytes,) = options.sizes(size)
    acts = dict.fromkeys(kinds.split(","), 0)
    with (
        company.keys_for("honest", "second", JOB) if encrypted else nullcontext() as keys,
        company.reducer("--memory-limit", memory_limit, keys=keys) as reducer,
        company.job(reducer.address, "honest", ranks, nbytes, keys) as honest,
        company.job(reducer.address, "second", ranks, nbytes, keys) as second,
    ):
        comparison = company.Comparison(honest, second, count, acts)
        for _ in range(rounds):
            comparison.measure_usual()
            for kind in acts:
                with company.intruder(kind, reducer.address, keys) as counts:
                    comparison.measure(kind)
                acts[kind] += sum(counts)
    sys.exit(comparison.report(f"{'times':>8}", {kind: f"{acts[kind]:8}" for kind in acts}))


if __name__ == "__main__":
    typer.run(main)
