"""What strangers at a reducer's port cost the job that it serves.

    python -m hostile.strangers --idle 1000 --rounds 5 [--keys]

The honest job is measured alone, beside an honest second one, which is its fair share, and while
strangers of each kind come, in turn, several times over; and the reducer's open files before,
meanwhile and afterwards. In the end processes say mutated sessions, one after the other, for the
longest step of a job of small buffers. bench/README.md defines every figure.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Annotated

import typer

from bench import options
from hostile import company
from hostile.zmtp import STRANGERS, dial

PATIENCE_S = 30.0  # for files to be closed
IDLE = "idle at once"
LONGEST_S = 0.2


def main(  # noqa: PLR0917 (options have names on the command line)
    ranks: Annotated[int, typer.Option(help="Of each honest job.")] = 2,
    size: Annotated[str, typer.Option(help="Of a buffer.")] = "4MiB",
    count: Annotated[int, typer.Option(help="All-reduces per measurement.")] = 30,
    rounds: Annotated[int, typer.Option(help="Measurements of each kind, in turn.")] = 5,
    idle: Annotated[int, typer.Option(help="Connections that say nothing.")] = 1000,
    kinds: Annotated[str, typer.Option(help="Of strangers.")] = ",".join(STRANGERS),
    handshake_timeout: Annotated[str, typer.Option(help="Of the reducer.")] = "2s",
    hasty: Annotated[int, typer.Option(help="Processes that say mutated sessions.")] = 4,
    seconds: Annotated[float, typer.Option(help="For so long.")] = 12.0,
    encrypted: Annotated[bool, typer.Option("--keys", help="The reducer has keys.")] = False,
) -> None:
    """Measure, and print tables.

    Exit 1 if files stayed open, a step was longer than `LONGEST_S` beside mutated sessions, or as
    `hostile.tenants` does.
    """
    (nbytes,) = options.sizes(size)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    came = dict.fromkeys([IDLE, *kinds.split(",")], 0)
    files = dict.fromkeys(came, (0, 0, 0))
    with (
        company.keys_for("honest", "second", "small") if encrypted else nullcontext() as keys,
        company.reducer("--handshake-timeout", handshake_timeout, keys=keys) as reducer,
        company.job(reducer.address, "honest", ranks, nbytes, keys) as honest,
        company.job(reducer.address, "second", ranks, nbytes, keys) as second,
        company.job(reducer.address, "small", ranks, 1 << 14, keys) as small,
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
        haste = {kind: _hurry(kind, small, reducer, hasty, seconds) for kind in ("spin", "mutate")}
    columns = {
        kind: f"{came[kind]:8}" + "".join(f"{seen:7}" for seen in files[kind]) for kind in came
    }
    code = comparison.report(f"{'times':>8}{'files':>7}{'most':>7}{'after':>7}", columns)
    left = [kind for kind, (_, _, after) in files.items() if after > before]
    print(f"files left open by: {', '.join(left) or '-'}")
    for kind, (longest_s, most, times) in haste.items():
        print(f"{hasty} of {kind:8} {times:8} times: longest step {longest_s:.3f} s, files {most}")
    sys.exit(code or bool(left) or haste["mutate"][0] > LONGEST_S)


def _hurry(
    kind: str, job: company.Job, reducer: company.Reducer, processes: int, seconds: float
) -> tuple[float, int, int]:
    """Return a job's longest step (s) beside those who hurry, the most open files, their times."""
    job.longest, most = 0.0, 0
    with ExitStack() as stack:
        counts = [
            stack.enter_context(company.intruder(kind, reducer.address)) for _ in range(processes)
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            job.median(100)
            most = max(most, reducer.files)
    return job.longest, most, sum(map(sum, counts))


@contextmanager
def _idle(address: str, count: int) -> Iterator[list[int]]:
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
