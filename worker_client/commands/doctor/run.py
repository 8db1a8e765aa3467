"""The command: examines everything, and says it to people or to programs.

People get tables in colour at a terminal, and the same words in plain lines elsewhere: in pipes, at
terminals without colours, and with NO_COLOR.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from reducer.commands import terminal
from reducer.errors import ConfigError
from reducer.wire.messages import printable
from worker_client import config
from worker_client.client import bootstrap
from worker_client.commands.doctor.dumps import examine_dumps, pickle_dumps
from worker_client.commands.doctor.examine import examine
from worker_client.commands.doctor.findings import Health, Problem, compare, mbit
from worker_client.commands.doctor.greeting import split
from worker_client.commands.doctor.host import examine_host
from worker_client.commands.launch import found_out, report
from worker_client.runtime.credentials import load as load_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from worker_client.commands.doctor.dumps import Finding
    from worker_client.launch import Resolved

    Row = tuple[str, str, str]

HELLO_TIMEOUT_S = 5.0  # for a reducer that has answered the greeting to answer a HELLO
GOOD, BAD, NAME = "green", "bold red", "bold"
NO_REDUCERS = "no reducers are named: every rank hosts one (set REDUCTION_SERVERS to use a pool)"
ALL_ALIKE = "no call failed, and all ranks made the same ones"


def doctor_dumps(directory: Path, *, as_json: bool, pickled: bool) -> int:
    """Print what the files of ranks' latest calls say; return the exit code, 1 if it is bad.

    Raises:
        ConfigError: there are no such files, or one of them cannot be read or written.
    """
    found = examine_dumps(directory)
    if pickled:
        pickle_dumps(directory)
    if as_json:
        _print_json({"findings": [one._asdict() for one in found]})
    else:
        _print_findings(found)
    return 1 if found else 0


def doctor(*, as_json: bool) -> int:
    """Print what was found and what to do about it; return the exit code, 1 if it is bad."""
    try:
        resolved = config.launch()
        settings = config.load()
        load_keys(settings.keys)  # what is wrong with them is wrong at every reducer
    except ConfigError as error:
        if as_json:
            problem = _told(None, "settings", str(error), "correct it")
            _print_json({"detected": None, "reducers": [], "problems": [problem]})
        else:
            _print_sentence(f"settings: {error}", BAD)
        return 1
    told = bool(config.environment().get("GLOO_SOCKET_IFNAME"))
    reducers = [split(address)[0] for address in settings.servers]
    host = list(examine_host(resolved, reducers, told=told))
    if not as_json:
        _print_detected(found_out(resolved))
        _print_host(host)
    connect = partial(bootstrap.connect_alone, connect_timeout=HELLO_TIMEOUT_S)
    found = compare([examine(address, connect, settings.servers) for address in settings.servers])
    if as_json:
        _print_json(_facts(resolved, host, found))
    else:
        _print_reducers(found)
    ill = any(problem.certain for problem in host) or any(one.problem for one in found)
    return 1 if ill else 0


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(facts, indent=2))


def _facts(resolved: Resolved, host: Sequence[Problem], found: Sequence[Health]) -> dict[str, Any]:
    described = resolved.described()
    ill: list[tuple[str | None, Problem]] = [(None, one) for one in host if one.certain]
    ill += [(one.address, one.problem) for one in found if one.problem]
    return {
        "detected": {
            field: {"value": value, "because": because} for field, value, because in described
        },
        "reducers": [
            {field: fact for field, fact in vars(one).items() if field != "problem"}
            for one in found
        ],
        "problems": [_told(at, one.kind.value, one.message, one.advice) for at, one in ill],
    }


def _told(address: str | None, kind: str, message: str, advice: str) -> dict[str, str | None]:
    return {"address": address, "kind": kind, "message": message, "advice": advice}


def _print_detected(rows: Sequence[Row]) -> None:
    if console := _pretty():
        console.print(_table([_styled(row, (NAME, "", "dim")) for row in rows]))
        return
    for line in report(rows):
        typer.echo(line)
    typer.echo("")


def _print_host(found: Sequence[Problem]) -> None:
    for problem in found:
        style = BAD if problem.certain else NAME
        _print_sentence(f"{problem.kind.value}: {problem.message}", style)
        _print_sentence(f"what to do: {problem.advice}", NAME)
    if found:
        typer.echo("")


def _print_reducers(found: Sequence[Health]) -> None:
    ill = sum(one.problem is not None for one in found)
    last = f"{len(found) - ill} of {len(found)} reducers are well" if found else NO_REDUCERS
    console = _pretty()
    if console and found:
        rows = []
        for one in found:
            (name, state, text), *more = _rows(one)
            how = Text.assemble((state, GOOD if one.problem is None else BAD), f" {text}")
            for _, what, then in more:
                how.append_text(Text.assemble("\n", (what, NAME), f" {then}"))
            rows.append((Text(name, NAME), how))
        console.print(_table(rows))
    else:
        width = max((len(one.address) for one in found), default=0) + len("reducer ")
        for address, state, text in (row for one in found for row in _rows(one)):
            typer.echo(terminal.wrapped(f"{address:<{width}}  {state} {text}", width + 4))
    _print_sentence(last, BAD if ill else GOOD)


def _print_findings(found: Sequence[Finding]) -> None:
    console = _pretty()
    for job in dict.fromkeys(one.job for one in found):
        messages = [printable(one.message) for one in found if one.job == job]
        _print_sentence(f"job {printable(job)}", NAME)
        if console:
            console.print(_table([(Text(message),) for message in messages]))
        else:
            for message in messages:
                typer.echo(terminal.wrapped(f"  {message}", 4))
    if not found:
        _print_sentence(ALL_ALIKE, GOOD)


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


def _print_sentence(text: str, style: str) -> None:
    if console := _pretty():
        console.print(Text(text, style))
    else:
        typer.echo(terminal.wrapped(text, 4))


def _styled(row: Row, styles: Row) -> tuple[Text, ...]:
    return tuple(Text(text, style) for text, style in zip(row, styles, strict=True))


def _table(rows: Sequence[tuple[Text, ...]]) -> Table:
    columns = (Column(overflow="fold") for _ in rows[0])
    table = Table(*columns, box=ROUNDED, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _pretty() -> Console | None:
    """Return standard output if it is a terminal that may have colours."""
    console = Console(highlight=False)
    colours = console.color_system is not None and not console.no_color
    return console if console.is_terminal and colours else None
