"""What strangers at a reducer's port cost the job that it serves.

    python -m bench.strangers --idle 1000 --rounds 5 [--keys]

The honest job is measured alone, beside an honest second one, which is its fair share, and while
strangers of each kind come, in turn, several times over; and the reducer's open files before,
meanwhile and afterwards. README.md defines every figure.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from bench import company, options
from bench.zmtp import STRANGERS, dial

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 30.0  # for files to be closed
IDLE = "idle at once"


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(help="Of each honest job.")] = 2,
    size: Annotated[str, typer.Option(help="Of a buffer.")] = "4MiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 30,
    rounds: Annotated[int, typer.Option(help="Measurements of each kind, in turn.")] = 5,
    idle: Annotated[int, typer.Option(help="Connections that say nothing.")] = 1000,
    kinds: Annotated[str, typer.Option(help="Of strangers.")] = ",".join(STRANGERS),
    handshake_timeout: Annotated[str, typer.Option(help="Of the reducer.")] = "2s",
    encrypted: Annotated[bool, typer.Option("--keys", help="The reducer has keys.")] = False,
) -> None:
    """Measure, print a table, exit 1 if files stayed open, or as `bench.tenants` does."""
    (nbytes,) = options.sizes(size)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    came = dict.fromkeys([IDLE, *kinds.split(",")], 0)
    files = dict.fromkeys(came, (0, 0, 0))
    with (
        company.keys_for("honest", "second") if encrypted else nullcontext() as keys,
        company.reducer("--handshake-timeout", handshake_timeout, keys=keys) as reducer,
        company.job(reducer.address, "honest", ranks, nbytes, keys) as honest,
        company.job(reducer.address, "second", ranks, nbytes, keys) as second,
    ):
        comparison = company.Comparison(honest, second, count, came)
        before = reducer.files
        for _ in range(rounds):
            comparison.measure_usual()
            for kind in came:
                crowd = (
                    _idle(reducer.address, idle)
                    if kind == IDLE
                    else company.intruder(kind, reducer.address)
                )
                with crowd as counts:
                    comparison.measure(kind)
                    meanwhile = reducer.files
                    if kind == IDLE:
                        settle(reducer, before)  # they are still there: the reducer closes them
                came[kind] += sum(counts)
                seen = (before, meanwhile, settle(reducer, before))
                files[kind] = max(files[kind], seen)
    columns = {
        kind: f"{came[kind]:8}" + "".join(f"{seen:7}" for seen in files[kind]) for kind in came
    }
    code = comparison.report(f"{'times':>8}{'files':>7}{'most':>7}{'after':>7}", columns)
    left = [kind for kind, (_, _, after) in files.items() if after > before]
    print(f"files left open by: {', '.join(left) or '-'}")
    sys.exit(code or bool(left))


@contextmanager
def _idle(address: str, count: int) -> Iterator[list[int]]:
    """Connect so many times, and say nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(dial(address))
        yield [count]


def settle(reducer: company.Reducer, expected: int) -> int:
    """Wait until a reducer has no more files open than before; return how many there are."""
    until = time.monotonic() + PATIENCE_S
    while reducer.files > expected and time.monotonic() < until:
        time.sleep(0.1)
    return reducer.files


if __name__ == "__main__":
    typer.run(main)
