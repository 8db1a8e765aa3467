"""`reducer status` and `reducer top`: what reducers do, as their HTTP ports tell it."""

from __future__ import annotations

import itertools
import json as standard_json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from reducer.commands.status_client import Found, addresses, read_all
from reducer.commands.status_tables import rates_between, render
from reducer.monitoring.status import dump

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

PIPE_WIDTH = 200  # characters
Ports = Annotated[str, typer.Argument(metavar="HOST:PORT,...", help="HTTP ports of reducers.")]


def status(
    ports: Ports,
    json: Annotated[bool, typer.Option("--json", help="Print all there is, as JSON.")] = False,
) -> None:
    """Show reducers and their jobs once.

    Exit code: 0 if all reducers serve, 1 if one does not or cannot be read, 2 if the command is
    wrong.
    """
    found = read_all(addresses(ports))
    if json:
        typer.echo(standard_json.dumps([_as_json(each) for each in found], indent=2))
    else:
        _console().print(render(found))
    if not all(each.status and each.status.state == "serving" for each in found):
        raise typer.Exit(1)


def top(
    ports: Ports,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks; 0: until Ctrl-C.")] = 0,
) -> None:
    """Show reducers, with rates, again and again. Ctrl-C ends it.

    Exit code: 0, or 2 if the command is wrong.
    """
    console = _console()
    looks = _looks(addresses(ports), interval, count)
    try:
        if not console.is_terminal:  # then one picture follows the other
            for picture in looks:
                console.print(picture)
            return
        with Live(next(looks), console=console, screen=True, auto_refresh=False) as live:
            for picture in looks:
                live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return


def _looks(where: list[str], interval_s: float, count: int) -> Iterator[RenderableType]:
    """Yield what reducers do, `count` times, or for ever if that is 0."""
    before = read_all(where)
    yield render(before, {})
    for _ in range(1, count) if count else itertools.count():
        time.sleep(interval_s)
        after = read_all(where)
        yield render(after, rates_between(before, after))
        before = after


def _console() -> Console:
    """Return standard output; a file or a pipe is wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _as_json(each: Found) -> dict[str, object]:
    if each.status is None:
        return {"http": each.address, "error": str(each.error)}
    return {"http": each.address, **standard_json.loads(dump(each.status))}
