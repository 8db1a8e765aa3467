"""What strangers at a reducer's port cost the job that it serves.

    python -m bench.strangers --idle 1000 [--keys]

A job's throughput is measured alone and while strangers of each kind come, and the reducer's open
files before, meanwhile and afterwards. README.md defines every figure.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack, nullcontext
from typing import Annotated

import typer

from bench import company, options
from bench.zmtp import STRANGERS, dial

PATIENCE_S = 30.0  # for files to be closed


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(help="Of the honest job.")] = 2,
    size: Annotated[str, typer.Option(help="Of a buffer.")] = "4MiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 30,
    idle: Annotated[int, typer.Option(help="Connections that say nothing.")] = 1000,
    kinds: Annotated[str, typer.Option(help="Of strangers.")] = ",".join(STRANGERS),
    handshake_timeout: Annotated[str, typer.Option(help="Of the reducer.")] = "2s",
    encrypted: Annotated[bool, typer.Option("--keys", help="The reducer has keys.")] = False,
) -> None:
    """Measure, print a table, exit 1 if a result was wrong or files stayed open."""
    (nbytes,) = options.sizes(size)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    left = []
    with (
        company.keys_for("honest") if encrypted else nullcontext() as keys,
        company.reducer("--handshake-timeout", handshake_timeout, keys=keys) as reducer,
        company.job(reducer.address, "honest", ranks, nbytes, keys) as honest,
    ):
        honest.median(count)
        before = reducer.files
        print(f"{'':12}{'of alone':>10}{'times':>8}{'files':>7}{'most':>7}{'after':>7}")
        with ExitStack() as stack:
            alone = honest.median(count)
            for _ in range(idle):
                stack.enter_context(dial(reducer.address))
            meanwhile = honest.median(count)
            while_here = reducer.files
            after = settle(reducer, before)  # they are still there: the reducer has closed them
        left += ["idle"] * (after > before)
        print(f"{idle:7} idle{meanwhile / alone:10.2f}{idle:8}{before:7}{while_here:7}{after:7}")
        for kind in kinds.split(","):
            alone = honest.median(count)
            with company.intruder(kind, reducer.address) as counts:
                meanwhile = honest.median(count)
                while_here = reducer.files
            after = settle(reducer, before)
            left += [kind] * (after > before)
            print(
                f"{kind:12}{meanwhile / alone:10.2f}{sum(counts):8}"
                f"{before:7}{while_here:7}{after:7}"
            )
    print(f"wrong elements: {honest.wrong}; files left open by: {', '.join(left) or '-'}")
    sys.exit(int(honest.wrong > 0 or bool(left)))


def settle(reducer: company.Reducer, expected: int) -> int:
    """Wait until a reducer has no more files open than before; return how many there are."""
    until = time.monotonic() + PATIENCE_S
    while reducer.files > expected and time.monotonic() < until:
        time.sleep(0.1)
    return reducer.files


if __name__ == "__main__":
    typer.run(main)
