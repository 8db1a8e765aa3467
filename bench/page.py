"""A page of headings, sentences, tables and pictures, as HTML or Markdown."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ccc; padding: .15em .6em; text-align: right }
th:first-child, td:first-child { text-align: left }
div { overflow-x: auto }
img { max-width: 100% }
pre { overflow-x: auto; background: #f5f5f5; padding: .8em }
"""


class Page:
    """What is on it, in order; `write` gives the whole.

    Args:
        title: the heading of all.
        folder: where Markdown finds its pictures, beside it.
    """

    def __init__(self, title: str, folder: str) -> None:
        self._title = title
        self._folder = folder
        self._html: list[str] = []
        self._markdown = [f"# {title}"]
        self._pictures: dict[str, bytes] = {}

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading; 2 is the level below the title."""
        self._html.append(f"<h{level}>{escape(text)}</h{level}>")
        self._markdown.append(f"{'#' * level} {text}")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._html.append(f"<p>{escape(text)}</p>")
        self._markdown.append(text)

    def code(self, text: str) -> None:
        """Add lines as they are."""
        self._html.append(f"<pre>{escape(text)}</pre>")
        self._markdown.append(f"```\n{text}\n```")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of texts; the first column names the row."""
        self._html.append(
            "<div><table><thead>"
            + _html_row("th", head)
            + "</thead><tbody>"
            + "".join(_html_row("td", row) for row in rows)
            + "</tbody></table></div>"
        )
        rule = ["---"] + ["---:"] * (len(head) - 1)
        lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
        self._markdown.append("\n".join(lines))

    def picture(self, png: bytes, what: str) -> None:
        """Add a picture; `what` is for those who do not see it."""
        data = base64.b64encode(png).decode()
        self._html.append(f'<p><img alt="{escape(what)}" src="data:image/png;base64,{data}"></p>')
        name = f"{len(self._pictures) + 1}.png"
        self._pictures[name] = png
        self._markdown.append(f"![{what}]({self._folder}/{name})")

    def write(self, path: Path) -> None:
        """Write it, as Markdown if the name ends in ``.md``; its pictures go beside that."""
        if path.suffix != ".md":
            path.write_text(self._whole_html())
            return
        folder = path.with_name(self._folder)
        folder.mkdir(exist_ok=True)
        for name, png in self._pictures.items():
            (folder / name).write_bytes(png)
        path.write_text("\n\n".join(self._markdown) + "\n")

    def _whole_html(self) -> str:
        title = escape(self._title)
        head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        body = "\n".join([f"<h1>{title}</h1>", *self._html])
        start = f'<!doctype html>\n<html lang="en"><head>{head}</head>'
        return f"{start}<body>\n{body}\n</body></html>\n"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
