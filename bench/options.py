"""Options that the benchmarks share."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from bench import report, results
from bench.contenders import Contender
from bench.contest import Contest, Step, hosts_needed
from bench.results import NEAR, Distance, Kind, Results, Run, Settings, TableResults
from harness import HarnessError
from lab import Lab, LabUnavailable

Workers: TypeAlias = Annotated[int, typer.Option(min=2, help="Ranks, each on a host of its own.")]
Reducers: TypeAlias = Annotated[int, typer.Option(min=1, help="Reducers on hosts of their own.")]
Embedded: TypeAlias = Annotated[
    bool, typer.Option("--embedded", help="No such reducers: ranks host them.")
]
AlsoEmbedded: TypeAlias = Annotated[bool, typer.Option(help="Reducers that ranks host, too.")]
Mbit: TypeAlias = Annotated[float, typer.Option(help="Rate of every link, Mbit/s each way.")]
Unshaped: TypeAlias = Annotated[
    bool, typer.Option("--unshaped", help="Loopback without shaping: the CPU is the limit.")
]
RoundTripMs: TypeAlias = Annotated[
    float, typer.Option(help="Between two hosts; 0 for what the kernel takes.")
]
LossPercent: TypeAlias = Annotated[float, typer.Option(help="Packets that are lost on the way.")]
Congestion: TypeAlias = Annotated[str, typer.Option(help="How TCP chooses its rate, such as bbr.")]
Sizes: TypeAlias = Annotated[str, typer.Option(help="Bytes per rank.")]
Baselines: TypeAlias = Annotated[
    str, typer.Option(help="Of gloo, mpi, mpi-ring, mpi-segmented and ring; empty for none.")
]
Iterations: TypeAlias = Annotated[str, typer.Option(help="All-reduces per round, or auto.")]
Rounds: TypeAlias = Annotated[int, typer.Option(min=1, help="How often each has its turn.")]
Json: TypeAlias = Annotated[Path | None, typer.Option(help="File for the results.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="File for a picture (PNG).")]

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
BASELINES = {
    each.name: each
    for each in (
        Contender("gloo"),
        Contender("mpi"),
        Contender("mpi", algorithm="ring"),
        Contender("mpi", algorithm="segmented"),
        Contender("ring"),
    )
}


@contextmanager
def command(module: str) -> Iterator[None]:
    """End a command with a message where its processes, or a lab, cannot go on."""
    try:
        yield
    except (HarnessError, LabUnavailable) as error:
        sys.exit(f"{module}: {error}")


def sizes(text: str) -> list[int]:
    """Read ``4KiB,1MiB``; each must hold a whole number of fp32 elements, and at least one."""
    try:
        found = [int(size) for size in TypeAdapter(list[ByteSize]).validate_python(_words(text))]
    except ValidationError:
        raise typer.BadParameter(f"write sizes such as 4KiB,1MiB, not {text!r}") from None
    if not found or any(size < 4 or size % 4 for size in found):
        raise typer.BadParameter(f"sizes are multiples of 4 bytes, got {text!r}")
    return found


def steps(text: str) -> list[int | Step]:
    """Read sizes as `sizes` does, and steps such as ``64B+64MiB`` or ``1MiB&24x4MiB``.

    What ``+`` joins is done one after the other; what ``&`` joins, or ``N x`` repeats, is begun
    together.
    """
    found: list[int | Step] = []
    for word in _words(text):
        groups = []
        for group in word.split("+"):
            parts = [part.rpartition("x") for part in group.split("&")]
            groups.append(
                tuple(
                    nbytes
                    for times, _, size in parts
                    for nbytes in sizes(size) * (counts(times)[0] if times else 1)
                )
            )
        alone = len(groups) == len(groups[0]) == 1
        found.append(groups[0][0] if alone else Step(word, tuple(groups)))
    return found


def counts(text: str) -> list[int]:
    """Read ``2,4,8``: numbers of at least 1."""
    words = _words(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"write numbers such as 2,4,8, not {text!r}")
    return [int(word) for word in words]


def iterations(text: str) -> int | None:
    """Read a number of iterations, or ``auto`` (None)."""
    return None if text == "auto" else counts(text)[0]


def ours(
    workers: int,
    reducers: str,
    embedded: bool,
    mixed: int,
    wire_dtypes: str = "",
    *,
    keys: bool = False,
) -> list[Contender]:
    """List the topologies that were asked for; a pool of as many reducers as workers if none.

    Of each pool there is a further one for each wire dtype, and of all these one with keys.
    """
    found = [Contender("pool", count) for count in counts(reducers)]
    found += [Contender("embedded")] if embedded else []
    found += [Contender("mixed", mixed)] if mixed else []
    found = found or [Contender("pool", workers)]
    pools = [contender for contender in found if contender.kind == "pool"]
    for wire_dtype in _words(wire_dtypes):
        if wire_dtype not in {"bf16", "fp16", "int8", "fp8_e4m3"}:
            raise typer.BadParameter(f"{wire_dtype!r} is none of bf16, fp16, int8, fp8_e4m3")
        found += [replace(pool, wire_dtype=wire_dtype) for pool in pools]
    if keys:
        found += [replace(pool, keyed=True) for pool in found if pool.kind == "pool"]
    return found


def baselines(text: str) -> list[Contender]:
    words = _words(text)
    for word in words:
        if word not in BASELINES:
            raise typer.BadParameter(f"{word!r} is none of {', '.join(BASELINES)}")
    return [contender for name, contender in BASELINES.items() if name in words]


def lab(hosts: int, mbit: float | None, distance: Distance = NEAR) -> Lab:
    """Make the lab: hosts with links of this rate, or, if it is None, loopback."""
    return Lab.loopback(hosts) if mbit is None else Lab(hosts, mbit, **distance.model_dump())


@contextmanager
def contest(
    workers: int,
    contenders: Sequence[Contender],
    mbit: float | None,
    distance: Distance = NEAR,
    *,
    streams: int = 1,
) -> Iterator[Contest]:
    """Start all contenders in a lab of their own; the arguments are of `lab` and `Contest`."""
    with lab(hosts_needed(workers, contenders), mbit, distance) as hosts, ExitStack() as stack:
        running = Contest(hosts, workers, contenders, streams=streams)
        running.start(stack)
        yield running


def link_rate(mbit: float | None) -> float | None:
    """Return the rate that links can have: without root none, which it says."""
    if mbit is None or os.geteuid() == 0:
        return mbit
    print("# shaped links need root: measuring on loopback, unshaped, instead")
    return None


def begin(module: str) -> Run:
    """Describe the machine and the command that begins, and warn if the machine is busy."""
    run = results.begin(module)
    if warning := results.busy(run.load, run.machine.cores):
        print(f"# {warning}")
    return run


def begin_all_reduces(
    kind: Kind,
    mbit: float | None,
    workers: list[int],
    rounds: int,
    *,
    distance: Distance = NEAR,
    streams: int = 1,
    room: str = "bench",
) -> Results:
    """Return results without rows yet, of links with this rate if they can have it."""
    settings = Settings(
        mbit=link_rate(mbit),
        payload_rates=[],
        streams=streams,
        distance=distance,
        workers=workers,
        rounds=rounds,
        skipped={},
    )
    return Results(**dict(begin(f"{room}.{kind}")), kind=kind, settings=settings)


def finish(found: Results, json: Path | None, plot: Path | None) -> int:
    """Write the files that were asked for; 1 if an element was wrong, or ours was not measured."""
    for name, reason in found.settings.skipped.items():
        print(f"# {name} was not measured: {reason}")
    if json:
        found.write(json)
    if plot:
        plot.write_bytes(report.picture(found))
    if found.soak:
        return int(found.soak.wrong > 0)
    return int(any(row.wrong for row in found.rows) or not any(row.ours for row in found.rows))


def write_table(run: Run, rows: list[dict[str, str | float]], json: Path | None) -> None:
    """Write the rows of the table that a benchmark has printed, if a file was asked for."""
    if json:
        TableResults(**dict(run), rows=rows).write(json)


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]
