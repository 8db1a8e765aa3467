"""`worker-client timeline report`: one page that says where a job's time went, with pictures.

The page needs no other file and no network. What timelines name is a stranger's, and shown as text.
"""

from __future__ import annotations

import io
import math
from functools import partial
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from reducer.wire.messages import printable
from worker_client.client.summary import count, lasting, size
from worker_client.commands import timeline, timeline_figures
from worker_client.commands.timeline_figures import (
    FOR_A_RANK,
    FOR_THE_SUM,
    NOTHING,
    OTHERWISE,
    QUEUED,
    RECEIVED,
    SENT,
    STATES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from worker_client.commands.timeline_figures import Figures

MOST_BARS = 32  # in a picture; tables have all of them
MOST_LETTERS = 40  # of a name there
MOST_JOBS = 5  # by name
MISSING = "No file says so: set REDUCTION_TIMELINE to a directory at every rank and reducer."
LATE_SHARE = 0.02  # of the time, from which on a sentence says that ranks waited
COLOURS = {
    NOTHING: "#dddddd",
    QUEUED: "#b07aa1",
    SENT: "#4e79a7",
    FOR_A_RANK: "#c0392b",
    FOR_THE_SUM: "#f1a340",
    RECEIVED: "#59a14f",
    OTHERWISE: "#555555",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 15px;
  color: #222; background: white }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere }
figure, .table { margin: 1em 0; overflow-x: auto }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .15em .6em; text-align: right; vertical-align: top }
td { border-top: 1px solid #ccc; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 6em }
p, li { max-width: 45em; overflow-wrap: anywhere }
"""


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        words: what its figures mean.
        head, rows: of its table.
        draw: draws its picture; None if there is nothing to draw.
        bars: in the picture, on which its height depends.
        above: what is between the picture and its title, points.
    """

    title: str
    words: str
    head: Sequence[str]
    rows: list[list[str]]
    draw: Callable[[Axes], object] | None
    bars: int
    above: int = 0


def report(paths: Sequence[Path], output: Path) -> list[str]:
    """Write the page of some timelines, and its pictures into a PNG beside it.

    Args:
        paths: files, and directories of them.
        output: the page; the PNG has its name with another ending.

    Returns:
        Sentences about files that were left out, and about clocks.

    Raises:
        ConfigError: as `timeline.read` and `timeline_figures.figures`; matplotlib is missing, or
            the output cannot be written.
    """
    if output.suffix not in {".html", ".htm"}:
        raise ConfigError(f"--output {output} is to be a page: give it a name that ends in .html")
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (slow to load, and not always there)
    except ImportError as error:
        raise ConfigError(
            f"the report draws with matplotlib: pip install matplotlib ({error})"
        ) from None
    processes, left_out = timeline.read(paths, output)
    clocks = timeline.align(processes)
    found = timeline_figures.figures(processes, clocks)
    notes = [*left_out, *map(timeline.described, clocks.values())]
    notes = [printable(note) for note in notes]
    sections = [_time(found), _sizes(found), _reducers(found), _late(found)]
    page = _page(found, sections, notes, Figure)
    try:
        output.write_text(page, encoding="utf-8")
        output.with_suffix(".png").write_bytes(_png(sections, Figure))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
    return notes


# -- what is on the page ---------------------------------------------------------------------------


def verdicts(found: Figures) -> list[str]:
    """Return the figures' answers, in sentences."""
    said = []
    if found.ranks:
        shares = [1 - one.spent_us[NOTHING] / found.lasted_us for one in found.ranks]
        said.append(
            f"Of {lasting(found.lasted_us / 1e6)}, ranks had an all-reduce in progress for "
            f"{_percent(sum(shares) / len(shares))} in the mean."
        )
    if found.sizes:
        most = max(found.sizes, key=lambda one: one.calls * one.most)
        said.append(
            f"Most bytes were in all-reduces of {_range(most.least, most.most)}: half of these "
            f"took {lasting(most.median_us / 1e6)} at most, 99 % {lasting(most.p99_us / 1e6)}."
        )
    if found.late and found.late[0].total_us >= LATE_SHARE * found.lasted_us:
        late = found.late[0]
        said.append(
            f"The others waited for {late.name} alone for {lasting(late.total_us / 1e6)}, "
            f"{_percent(late.total_us / found.lasted_us)} of the time: "
            f"{count(late.waits, 'wait')}, {lasting(late.median_us / 1e6)} in the median."
        )
    elif found.late:
        said.append(f"No rank alone was waited for {_percent(LATE_SHARE)} of the time.")
    if failed := sum(one.failed for one in found.ranks):
        said.append(f"{count(failed, 'all-reduce')} failed.")
    return said


def _time(found: Figures) -> Section:
    rows = []
    for one in found.ranks:
        shares = [_percent(one.spent_us[state] / found.lasted_us) for state in STATES]
        most = max(one.awaited_us.items(), key=lambda its: its[1], default=None)
        mostly = "" if most is None else f"{most[0]}, {lasting(most[1] / 1e6)}"
        rows.append([one.name, f"{one.calls:,}", size(one.nbytes), *shares, mostly])
    head = ["rank", "all-reduces", "bytes", *STATES, "mostly for"]
    words = (
        "What each rank did between the first all-reduce's call and the last one's end. While "
        "several are in progress, what the first of them does counts."
    )
    draw = partial(_draw_time, found) if found.ranks else None
    return Section("Where the time went", words, head, rows, draw, len(rows), above=36)


def _sizes(found: Figures) -> Section:
    rows = [
        [
            _range(one.least, one.most),
            f"{one.calls:,}",
            lasting(one.median_us / 1e6),
            lasting(one.p99_us / 1e6),
            f"{size(one.rate)}/s",
        ]
        for one in found.sizes
    ]
    head = ["bytes", "all-reduces", "half took at most", "99 % took at most", "bytes by time"]
    words = "From the call of an all-reduce to its end, at all ranks, of those that ended well."
    draw = partial(_draw_sizes, found) if found.sizes else None
    return Section("Time of an all-reduce by its size", words, head, rows, draw, len(rows))


def _reducers(found: Figures) -> Section:
    rows = []
    for one in found.reducers:
        times = one.gathered_us, one.waited_us, one.summed_us
        shares = [_percent(us / (sum(times) or 1)) for us in times]
        rate = f"{size(one.rate)}/s"
        rows.append([one.name, f"{one.rounds:,}", size(one.nbytes), rate, *shares])
    head = ["reducer", "all-reduces", "bytes from a rank", "rate", "gathered", "waited", "summed"]
    words = (
        "Bytes that came from each rank, and the same by the time that any all-reduce was in "
        "progress there. The shares are of the time of an all-reduce: until a chunk lacked one "
        "rank alone, while it did, and until the last result was ready."
    )
    draw = partial(_draw_rates, found) if any(one.rate for one in found.reducers) else None
    return Section("Rate by reducer", words, head, rows, draw, len(rows))


def _late(found: Figures) -> Section:
    rows = [
        [
            one.name,
            f"{one.waits:,}",
            lasting(one.total_us / 1e6),
            _percent(one.total_us / found.lasted_us),
            lasting(one.median_us / 1e6),
            lasting(one.longest_us / 1e6),
        ]
        for one in found.late
    ]
    head = ["rank", "waits", "together", "of the time", "median", "longest"]
    words = (
        "For how long a chunk waited at the reducers for this rank alone, the longest of each "
        "all-reduce. Waits at the same time count as one."
    )
    draw = partial(_draw_late, found) if found.late else None
    return Section("Who was late", words, head, rows, draw, len(rows))


def _page(
    found: Figures, sections: Iterable[Section], notes: Iterable[str], figure: type[Figure]
) -> str:
    jobs = ", ".join(found.jobs[:MOST_JOBS])
    more = len(found.jobs) - MOST_JOBS
    title = f"Timelines of {jobs}{f' and {more} more jobs' if more > 0 else ''}"
    reducers, ranks = count(len(found.reducers), "reducer"), count(len(found.ranks), "rank")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>\n<p>Files of {ranks} and {reducers}.</p>",
        _items(verdicts(found)),
    ]
    for section in sections:
        parts.append(f"<h2>{section.title}</h2>\n<p>{section.words}</p>")
        if not section.rows:
            parts.append(f"<p>{MISSING}</p>")
            continue
        if section.draw is not None:
            parts.append(f"<figure>{_svg(section, figure)}</figure>")
        parts.append(_table(section.head, section.rows))
    parts.append(f"<h2>Clocks and files</h2>\n{_items(notes)}\n</body>\n</html>\n")
    return "\n".join(parts)


def _items(sentences: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(one)}</li>\n" for one in sentences) + "</ul>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = ("".join(f"<td>{escape(one)}</td>" for one in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table>\n<tr>{titles}</tr>\n{body}\n</table></div>'


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(least: int, most: int) -> str:
    return size(least) if size(least) == size(most) else f"{size(least)} to {size(most)}"


# -- pictures --------------------------------------------------------------------------------------


def _draw_time(found: Figures, axes: Axes) -> None:
    ranks = found.ranks[:MOST_BARS]
    before = [0.0] * len(ranks)
    for state in STATES:
        shares = [100 * one.spent_us[state] / found.lasted_us for one in ranks]
        axes.barh(range(len(ranks)), shares, left=before, color=COLOURS[state], label=state)
        before = [left + share for left, share in zip(before, shares, strict=True)]
    _name_bars(axes, [one.name for one in ranks])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize="small", frameon=False)


def _draw_sizes(found: Figures, axes: Axes) -> None:
    sizes = [max(1, one.most) for one in found.sizes]
    for label, style, colour in (
        ("p99", "^:", COLOURS[FOR_A_RANK]),
        ("median", "o-", COLOURS[SENT]),
    ):
        times_s = [max(getattr(one, f"{label}_us"), 0.001) / 1e6 for one in found.sizes]
        axes.plot(sizes, times_s, style, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    least, most = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most)))
    axes.xaxis.set_major_formatter(lambda nbytes, _: size(nbytes))
    axes.yaxis.set_major_formatter(lambda seconds, _: lasting(seconds))
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("bytes of an all-reduce")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_rates(found: Figures, axes: Axes) -> None:
    reducers = found.reducers[:MOST_BARS]
    axes.barh(range(len(reducers)), [one.rate / 1e6 for one in reducers], color="#4e79a7")
    _name_bars(axes, [one.name for one in reducers])
    axes.set_xlabel("MB/s from each rank, while any all-reduce was in progress there")


def _draw_late(found: Figures, axes: Axes) -> None:
    late = found.late[:MOST_BARS]
    axes.barh(range(len(late)), [one.total_us / 1e6 for one in late], color=COLOURS[FOR_A_RANK])
    _name_bars(axes, [one.name for one in late])
    axes.xaxis.set_major_formatter(lambda seconds, _: lasting(seconds, digits=4))
    axes.set_xlabel("for so long the others waited for this rank alone")


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    # The font lacks many letters, and a long name leaves no room.
    labels = [name.encode("ascii", "replace").decode()[:MOST_LETTERS] for name in names]
    axes.set_yticks(range(len(names)), labels=labels, parse_math=False)
    axes.invert_yaxis()


def _height(section: Section) -> float:
    """Return the height of a section's picture, inches."""
    return max(2.6, 1.2 + 0.25 * min(section.bars, MOST_BARS))


def _svg(section: Section, figure: type[Figure]) -> str:
    """Return a section's picture as an element of the page."""
    from matplotlib import rc_context  # noqa: PLC0415 (slow to load)

    drawn = figure(figsize=(9, _height(section)), layout="constrained")
    assert section.draw is not None
    section.draw(drawn.subplots())
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": section.title}):
        drawn.savefig(written, format="svg", metadata=nothing)
    text = written.getvalue()
    return text[text.index("<svg") :]


def _png(sections: Sequence[Section], figure: type[Figure]) -> bytes:
    """Return all pictures, one below the other."""
    shown = [section for section in sections if section.draw is not None]
    heights = [_height(section) for section in shown]
    drawn = figure(figsize=(9, sum(heights)), layout="constrained")
    for axes, section in zip(
        drawn.subplots(len(shown), height_ratios=heights, squeeze=False)[:, 0], shown, strict=True
    ):
        assert section.draw is not None
        section.draw(axes)
        axes.set_title(section.title, loc="left", pad=6 + section.above)
    written = io.BytesIO()
    drawn.savefig(written, format="png", dpi=120)
    return written.getvalue()
