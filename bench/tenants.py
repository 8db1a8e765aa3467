"""What a hostile job costs an honest one on the same reducer.

    python -m bench.tenants --ranks 2 --size 4MiB --rounds 5 [--keys]

The honest job is measured alone, beside an honest second one, which is its fair share, and beside
a hostile one of each kind, in turn, several times over. README.md defines every figure.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from bench import company, options
from bench.intruder import JOB, TENANTS

ALONE, BESIDE = "alone", "beside an honest job"
BAR = 1.10


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(help="Of each honest job.")] = 2,
    size: Annotated[str, typer.Option(help="Of a buffer.")] = "4MiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 30,
    rounds: Annotated[int, typer.Option(help="Measurements of each kind, in turn.")] = 5,
    kinds: Annotated[str, typer.Option(help="Of hostility.")] = ",".join(TENANTS),
    memory_limit: Annotated[str, typer.Option(help="Of the reducer.")] = "1GiB",
    impl: Annotated[str, typer.Option(help="Of the reducer: compiled or plain.")] = "compiled",
    encrypted: Annotated[
        bool, typer.Option("--keys", help="Every job has keys of its own, the hostile one too.")
    ] = False,
) -> None:
    """Measure, print a table, exit 1 if a result was wrong or a ratio above the bar."""
    (nbytes,) = options.sizes(size)
    times: dict[str, list[float]] = {kind: [] for kind in (ALONE, BESIDE, *kinds.split(","))}
    acts = dict.fromkeys(times, 0)
    serve = ("--memory-limit", memory_limit, "--impl", impl)
    with (
        company.keys_for("honest", "second", JOB) if encrypted else nullcontext() as keys,
        company.reducer(*serve, keys=keys) as reducer,
        company.job(reducer.address, "honest", ranks, nbytes, keys) as honest,
        company.job(reducer.address, "second", ranks, nbytes, keys) as second,
    ):
        honest.median(count)
        for _ in range(rounds):
            times[ALONE].append(honest.median(count))
            second.begin(2 * count)
            times[BESIDE].append(honest.median(count))
            second.end()
            for kind in kinds.split(","):
                with company.intruder(kind, reducer.address, keys) as counts:
                    times[kind].append(honest.median(count))
                acts[kind] += sum(counts)
        wrong = honest.wrong + second.wrong
    print(f"{'':24}{'median':>10}{'of alone':>10}{'of fair':>10}{'times':>8}")
    above = []
    for kind, found in times.items():
        fair = company.ratio(found, times[BESIDE])
        median = sorted(found)[len(found) // 2]
        alone = company.ratio(found, times[ALONE])
        print(f"{kind:24}{median * 1e3:8.2f}ms{alone:10.2f}{fair:10.2f}{acts[kind]:8}")
        above += [kind] * (kind in TENANTS and fair > BAR)
    print(f"wrong elements: {wrong}; beyond {BAR:.2f} of a fair share: {', '.join(above) or '-'}")
    sys.exit(int(wrong > 0 or bool(above)))


if __name__ == "__main__":
    typer.run(main)
