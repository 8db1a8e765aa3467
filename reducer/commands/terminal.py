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
    """Return the characters of a terminal's line, and very many where there is none.

    Args:
        stream: what is written to; by default standard output.
    """
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
        title: above it.
        names: of the columns. The first tells rows apart, and each part of the table has it.
        rows: cells, as many as there are names.
        texts: how many columns, from the first on, are of text; the others are of numbers.
        caption: below it.
    """

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[Text | str]]
    texts: int
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the parts, for rich."""
        del console
        yield from self.parts(options.max_width)

    def parts(self, width: int) -> list[Table]:
        """Return tables that are no wider than this, each with the first column."""
        first, *others = range(len(self.names))
        if self._width(range(len(self.names)), whole_names=True) <= width:
            groups = [others]
        else:
            groups = [[]]
            for column in others:
                if groups[-1] and self._width([first, *groups[-1], column]) > width:
                    groups.append([])
                groups[-1].append(column)
        tables = [self._part([first, *group], width) for group in groups]
        tables[0].title = self.title or None
        tables[-1].caption = self.caption or None
        return tables

    def _part(self, chosen: Sequence[int], width: int) -> Table:
        table = Table(box=SIMPLE_HEAD, title_justify="left")
        narrow = self._width(chosen, whole_names=True) > width
        for column in chosen:
            # Names are wrapped before cells are, and cells only where one alone has no room.
            needed = min(self._needs(column), (width - 7) // 2) if narrow else None
            table.add_column(
                self.names[column],
                justify="left" if column < self.texts else "right",
                overflow="fold",
                width=needed,
            )
        for row in self.rows:
            table.add_row(*(row[column] for column in chosen))
        return table

    def _width(self, chosen: Sequence[int], *, whole_names: bool = False) -> int:
        """Return how wide a table of these columns is: each is padded, and edges are between."""
        return 1 + sum(self._needs(column, whole_names=whole_names) + 3 for column in chosen)

    def _needs(self, column: int, *, whole_names: bool = False) -> int:
        name = self.names[column]
        parts = [name] if whole_names else name.split()
        lines = [line for row in self.rows for line in str(row[column]).split("\n")]
        return max(cell_len(text) for text in (*parts, *lines))
