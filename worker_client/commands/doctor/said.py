"""How the doctor speaks to people: tables in colour at a terminal, elsewhere plain lines.

The words are the same. Plain lines are for pipes, terminals without colours, and NO_COLOR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reducer.commands import terminal
from reducer.wire.messages import printable
from worker_client.commands.doctor.findings import mbit
from worker_client.commands.launch import report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker_client.commands.doctor.dumps import Finding
    from worker_client.commands.doctor.findings import Health, Problem

    Row = tuple[str, str, str]

GOOD, BAD, NAME = "green", "bold red", "bold"
NO_REDUCERS = "no reducers are named: every rank hosts one (set REDUCTION_SERVERS to use a pool)"
ALL_ALIKE = "no call failed, and all ranks made the same ones"


def detected(rows: Sequence[Row]) -> None:
    """Print what was found out, with what said so."""
    console = _pretty()
    if console:
        table = _table(3)
        for name, value, because in rows:
            table.add_row(Text(name, NAME), Text(value), Text(because, "dim"))
        console.print(table)
    else:
        for line in report(rows):
            typer.echo(line)
        typer.echo("")


def host(found: Sequence[Problem]) -> None:
    """Print what is wrong with this host, and what to do about it."""
    for problem in found:
        _sentence(f"{problem.kind.value}: {problem.message}", BAD if problem.certain else NAME)
        _sentence(f"what to do: {problem.advice}", NAME)
    if found:
        typer.echo("")


def reducers(found: Sequence[Health]) -> None:
    """Print how each reducer is, and what to do about it."""
    ill = sum(one.problem is not None for one in found)
    last = f"{len(found) - ill} of {len(found)} reducers are well" if found else NO_REDUCERS
    console = _pretty()
    if console and found:
        table = _table(2)
        for one in found:
            (name, *first), *more = _rows(one)
            style = GOOD if one.problem is None else BAD
            how = Text.assemble((first[0], style), f" {first[1]}")
            for _, what, text in more:
                how.append_text(Text.assemble("\n", (what, NAME), f" {text}"))
            table.add_row(Text(name, NAME), how)
        console.print(table)
    else:
        width = max((len(one.address) for one in found), default=0) + len("reducer ")
        for address, state, text in (row for one in found for row in _rows(one)):
            typer.echo(terminal.wrapped(f"{address:<{width}}  {state} {text}", width + 4))
    _sentence(last, BAD if ill else GOOD)


def findings(found: Sequence[Finding]) -> None:
    """Print what files of calls show, job by job."""
    console = _pretty()
    for job in dict.fromkeys(one.job for one in found):
        messages = [printable(one.message) for one in found if one.job == job]
        _sentence(f"job {printable(job)}", NAME)
        if console:
            table = _table(1)
            for message in messages:
                table.add_row(Text(message))
            console.print(table)
        else:
            for message in messages:
                typer.echo(terminal.wrapped(f"  {message}", 4))
    if not found:
        _sentence(ALL_ALIKE, GOOD)


def mistake(message: str) -> None:
    """Print what is wrong with the settings."""
    _sentence(f"settings: {message}", BAD)


def _rows(one: Health) -> Iterator[Row]:
    """Yield who, how, and the rest; below it what to do, if something is wrong."""
    name = f"reducer {one.address}"
    if one.problem is None:
        yield name, "well:", _figures(one)
    else:
        yield name, f"{one.problem.kind.value}:", one.problem.message
        yield "", "what to do:", one.problem.advice


def _figures(one: Health) -> str:
    if one.round_trip_s is None or one.bytes_per_s is None:
        return ""
    threads = f", {one.lanes} threads" if one.lanes != 1 else ""
    rate = f"{mbit(one.bytes_per_s):.0f} Mbit/s each way{threads}"
    return f"round trip {one.round_trip_s * 1e3:.2f} ms, {rate}"


def _sentence(text: str, style: str) -> None:
    console = _pretty()
    if console:
        console.print(Text(text, style))
    else:
        typer.echo(terminal.wrapped(text, 4))


def _table(columns: int) -> Table:
    table = Table(box=ROUNDED, show_header=False)
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def _pretty() -> Console | None:
    """Return standard output if it is a terminal that may have colours."""
    console = Console(highlight=False)
    colours = console.color_system is not None and not console.no_color
    return console if console.is_terminal and colours else None
