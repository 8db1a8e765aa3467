"""How commands print: as wide as the terminal is, and tables that do not fit into it in parts."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from rich.console import ConsoleOptions
    from rich.text import Text

ENDLESS = 100_000  # characters: a line that is read by a program is not wrapped


def console(pipe_width: int) -> Console:
    """Return standard output.

    Args:
        pipe_width: characters of a line where there is no terminal. COLUMNS counts at a terminal
            alone: whatever has loaded readline, as an interactive Python has, hands it on as 80.
    """
    found = Console()
    return found if found.is_terminal else Console(width=pipe_width)


def columns(stream: TextIO | None = None) -> int:
    """Return the characters of a terminal's line, and very many where there is none."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else ENDLESS


def wrapped(line: str, indent: int, width: int | None = None) -> str:
    """Return a line that is wrapped at words; a word that is longer than a line stays whole.

    Args:
        line: without line breaks.
        indent: characters before what goes on in the next line.
        width: of a line; by default the terminal's.
    """
    width = columns() if width is None else width
    folded = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * (indent if 2 * indent <= width else 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(folded)


@dataclass
class FittedTable:
    """A table that fits: where columns have no room they are in a further table below.

    Attributes:
        names: of the columns. The first tells rows apart, and each part of the table has it.
        rows: cells, as many as there are names.
        texts: how many columns, from the first on, are of text; the others are of numbers.
    """

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[Text | str]]
    texts: int
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the parts, for rich."""

        def fits(table: Table) -> bool:
            needed = console.measure(table, options=options.update(width=ENDLESS))
            return needed.maximum <= options.max_width

        groups = [[*range(len(self.names))]]
        if not fits(self._part(groups[0], whole_names=True)):
            first, *others = groups.pop()
            for column in others:
                if not groups or not fits(self._part([*groups[-1], column])):
                    groups.append([first])
                groups[-1].append(column)
        whole = [self._part(group, whole_names=True) for group in groups]
        parts = [
            part if fits(part) else self._part(group)
            for part, group in zip(whole, groups, strict=True)
        ]
        parts[0].title = self.title or None
        parts[-1].caption = self.caption or None
        yield from parts

    def _part(self, chosen: Sequence[int], *, whole_names: bool = False) -> Table:
        table = Table(box=SIMPLE_HEAD, title_justify="left")
        for column in chosen:
            name = self.names[column]
            # Names are wrapped before cells are, and cells only where one alone has no room.
            lines = [line for row in self.rows for line in str(row[column]).split("\n")]
            folded = textwrap.fill(name, max(map(cell_len, (*name.split(), *lines))))
            table.add_column(
                name if whole_names else folded,
                justify="left" if column < self.texts else "right",
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*(row[column] for column in chosen))
        return table
