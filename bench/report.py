"""How results are shown: as text by the commands, and on one page with verdicts and pictures.

    python -m bench.report results/*.json -o report.html

The page takes the files of all benchmarks here and of pytest-benchmark, and is Markdown where the
output's name ends in ``.md``. It begins with verdicts, which are derived from the figures, and ends
with a glossary, which is taken from README.md.

This is one module, although a long one, because a table's columns are defined once for the
commands' text and for the page, and each kind of results has its columns, picture and verdict here.
"""

from __future__ import annotations

import base64
import io
import re
import sys
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bench.results import NEAR, ChaosResults, DdpResults, MicroResults, Results, busy, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.results import AnyResults, MicroBenchmark, Row, Settings, Soak

MIB = 1 << 20
README = Path(__file__).with_name("README.md")
TITLE = "Benchmarks of the reduction server"
COMPARISONS = (
    "Ours over each baseline. At equal workers: algbw over the baseline's; a pool of k reducers "
    "brings k further network cards, which are not free. At equal cards: the same per network "
    "card, as if the baseline's workers had the reducers' cards instead."
)
NO_CARDS = (
    "All processes share this machine's processors, and no network card limits them: the figures "
    "say what an all-reduce costs in processor time, and not what a network allows."
)
# The page must fit a browser of 1200 pixels: nothing on it may scroll sideways.
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1140px; margin: 2em auto; padding: 0 15px }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
table { font-variant-numeric: tabular-nums }
caption { text-align: left; color: #555 }
th, td { padding: .15em .5em; text-align: right; vertical-align: top }
td { border-top: 1px solid #ccc }
thead tr + tr th { font-weight: normal; color: #555; padding-top: 0 }
th:first-child, td:first-child, .words * { text-align: left }
.alarm, .warning { padding: .5em .8em; font-weight: bold }
.alarm { background: #b00020; color: white }
.warning { background: #ffe8a3 }
img { max-width: 100% }
pre { background: #f5f5f5; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere }
"""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        width: in characters, where a command prints rows one by one.
        cell: returns a row's text; ``-`` is for a figure that was not measured.
        setting: whether the page says it once, above the table, if it is the same in all rows.
    """

    title: str
    unit: str
    width: int
    cell: Callable[[Any], str]
    setting: bool = False


class Verdict(NamedTuple):
    """The answer of one result in plain words, and whatever must not be."""

    text: str
    alarms: list[str]


class Section(NamedTuple):
    """How one kind of results stands on the page.

    Attributes:
        terms: heading of the section of README.md with its terms.
        place: returns what was measured, such as ``4 workers, 1 Gbit/s``.
        fill: writes tables and the like.
    """

    title: str
    terms: str
    place: Callable[[Any], str]
    verdict: Callable[[Any], Verdict]
    fill: Callable[[Page, Any], None]


# Numbers as text


def size(nbytes: int, gap: str = "") -> str:
    """Return a size with the largest binary unit that leaves a whole number."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{gap}{unit}"
    return f"{nbytes}{gap}B"


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Return a figure with so many digits after the point, ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def link(mbit: float | None) -> str:
    """Return the rate of links, such as ``1 Gbit/s``."""
    if mbit is None:
        return "unshaped"
    return f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"


def conditions(settings: Settings) -> str:
    """Return the limit of the figures, as a sentence without its full stop."""
    if settings.mbit is None:
        return "unshaped, so that processors are the limit"
    ends = (min(settings.payload_rates), max(settings.payload_rates))
    rates = " to ".join(dict.fromkeys(f"{rate / 1e6:.2f}" for rate in ends))
    far = settings.distance
    parts = [f"links of {link(settings.mbit)} each way"]
    parts += [f"round trips of {far.round_trip_ms:g} ms"] * bool(far.round_trip_ms)
    parts += [f"{far.loss_percent:g} % of packets lost"] * bool(far.loss_percent)
    parts += [f"TCP {far.congestion}"] * (far.congestion != NEAR.congestion)
    parts += [f"ports of {size(far.port_bytes)}"] * bool(far.port_bytes)
    streams = f" with {settings.streams} streams" * (settings.streams > 1)
    return ", ".join([*parts, f"{rates} MB/s of payload by iperf3{streams}"])


# Tables as text. README.md defines the columns.


ALL_REDUCE = (
    Column("contender", "", 12, lambda row: row.contender),
    Column("n", "", 3, lambda row: str(row.workers), setting=True),
    Column("k", "", 3, lambda row: str(row.reducers)),
    Column("size", "", 8, lambda row: size(row.nbytes)),
    Column("count", "", 9, lambda row: str(row.count)),
    Column("type", "", 7, lambda row: row.dtype, setting=True),
    Column("redop", "", 5, lambda row: row.op, setting=True),
    Column("iters", "", 6, lambda row: str(row.iterations), setting=True),
    Column("time", "us", 10, lambda row: number(row.time_us, 1)),
    Column("mean", "us", 10, lambda row: number(row.mean_us, 1)),
    Column("p99", "us", 10, lambda row: number(row.p99_us, 1)),
    Column("algbw", "MB/s", 8, lambda row: number(row.algbw / 1e6, 2)),
    Column("busbw", "MB/s", 8, lambda row: number(row.busbw / 1e6, 2)),
    Column("#wrong", "", 6, lambda row: str(row.wrong)),
    Column("/payload", "", 8, lambda row: number(row.payload_share, 3)),
    Column("/limit", "", 7, lambda row: number(row.algbw / row.limit if row.limit else None, 3)),
    Column("cpu/GB", "s", 7, lambda row: number(row.worker_cpu_s_per_gb, 2)),
    Column("red/GB", "s", 7, lambda row: number(row.reducer_cpu_s_per_gb, 2)),
)
TRENDS = (
    Column("2nd half", "", 11, lambda trend: trend.process),
    Column("RSS at start", "MiB", 12, lambda trend: number(trend.start_rss / MIB, 2)),
    Column("RSS at end", "MiB", 10, lambda trend: number(trend.end_rss / MIB, 2)),
    Column("slope", "KiB/1000", 18, lambda trend: number(trend.bytes_per_1000 / 1024, 3)),
    Column("growth", "MiB", 8, lambda trend: number(trend.growth / MIB, 2)),
    Column("files", "", 11, lambda trend: _change(trend.files)),
    Column("threads", "", 11, lambda trend: _change(trend.threads)),
    Column("memory", "", 6, lambda trend: "flat" if trend.flat else "grows"),
)
DDP = (
    Column("variant", "", 10, lambda row: row.variant),
    Column("cap", "MB", 7, lambda row: str(row.bucket_cap_mb or "25 (1)")),
    Column("samples/s", "", 10, lambda row: number(row.samples_per_s, 1)),
    Column("step", "ms", 8, lambda row: number(row.step_ms, 1)),
    Column("median", "ms", 8, lambda row: number(row.median_ms, 1)),
    Column("p99", "ms", 8, lambda row: number(row.p99_ms, 1)),
    Column("cpu", "ms", 7, lambda row: number(row.cpu_ms, 1)),
    Column("exposed", "ms", 8, lambda row: number(row.exposed_ms, 1)),
    Column("all-reduce", "ms", 11, lambda row: number(row.all_reduce_ms, 1)),
    Column("ideal", "ms", 8, lambda row: number(row.ideal_ms, 1)),
    Column("/ ideal", "", 8, lambda row: number(row.exposed_over_ideal, 2)),
    Column("#wrong", "", 7, lambda row: str(row.wrong)),
)
CHAOS: dict[str, Callable[[ChaosResults], str]] = {
    "kills": lambda found: str(found.kills),
    "steps": lambda found: str(found.steps),
    "steps lost": lambda found: str(found.lost),
    "weights identical": lambda found: "yes" if found.identical else "NO",
    "median step": lambda found: (
        f"{1e3 * found.median_s:.1f} ms, undisturbed {1e3 * found.undisturbed_s:.1f} ms"
    ),
    "longest stall": lambda found: f"{found.stall_s:.2f} s",
    "from a kill to a finished step": lambda found: (
        f"median {1e3 * found.recovery_median_s:.0f} ms, p99 {1e3 * found.recovery_p99_s:.0f} ms"
    ),
    "chunks moved": lambda found: str(found.moved),
    "results claimed": lambda found: str(found.claimed),
    "results supplied": lambda found: str(found.supplied),
}
MICRO = (
    Column("name", "", 0, lambda each: each.name),
    Column("median", "us", 0, lambda each: number(1e6 * each.stats.median, 3)),
    Column("IQR", "us", 0, lambda each: number(1e6 * each.stats.iqr, 3)),
    Column("rounds", "", 0, lambda each: str(each.stats.rounds)),
    Column("speed", "GB/s", 0, lambda each: number(_gigabytes_per_s(each), 2)),
)
PAIR = (
    Column("", "", 0, lambda pair: pair[0]),
    Column("", "", 0, lambda pair: pair[1]),
)


def all_reduce_columns(baselines: Iterable[str]) -> list[Column]:
    """Return the columns of a command's table, which end with the ratios to the baselines."""
    return [*ALL_REDUCE, *_ratios(baselines, "ratios", "")]


def heading(columns: Sequence[Column]) -> str:
    """Return the two lines above the rows."""
    titles = " ".join(f"{column.title:>{column.width}}" for column in columns)
    units = " ".join(f"{column.unit:>{column.width}}" for column in columns)
    return f"{titles.rstrip()}\n{units.rstrip()}"


def line(columns: Sequence[Column], row: object) -> str:
    return " ".join(f"{column.cell(row):>{column.width}}" for column in columns)


def soak_text(soak: Soak) -> str:
    trends = [line(TRENDS, trend) for trend in soak.trends]
    return "\n".join([_soaked(soak), heading(TRENDS), *trends, _growth(soak)])


def ddp_text(found: DdpResults) -> str:
    about = [f"# {text}" for text in _ddp_facts(found)]
    rows = [line(DDP, row) for row in found.rows]
    return "\n".join([*about, heading(DDP), *rows, _ddp_gain(found), _ddp_weights(found)])


def chaos_text(found: ChaosResults) -> str:
    lines = [f"{name:<30}  {cell(found)}" for name, cell in CHAOS.items()]
    return "\n".join([f"# {_chaos_place(found)}, all on this machine", *lines])


def _ratios(baselines: Iterable[str], attribute: str, unit: str) -> list[Column]:
    def cell(row: Row, name: str) -> str:
        return number(getattr(row, attribute).get(name), 2, "x")

    return [
        Column(f"x {name}", unit, max(8, len(name) + 2), partial(cell, name=name))
        for name in baselines
    ]


def _soaked(soak: Soak) -> str:
    return (
        f"{soak.all_reduces:,} all-reduces, {soak.nbytes / 1e9:.1f} GB per rank, "
        f"{soak.seconds:.0f} s; {soak.wrong} wrong of {soak.checked:,} elements compared"
    )


def _growing(soak: Soak) -> str:
    return ", ".join(trend.process for trend in soak.trends if not trend.flat)


def _growth(soak: Soak) -> str:
    most = max(trend.growth for trend in soak.trends) / MIB
    growing = _growing(soak)
    verdict = f"memory grows in {growing}" if growing else "memory is flat"
    return f"{verdict}: over the second half at most {most:+.2f} MiB"


def _ddp_facts(found: DdpResults) -> list[str]:
    reducers = f"{found.reducers} reducers" if found.reducers else "embedded reducers"
    wire = f"wire limit {found.wire_ms:.0f} ms, " if found.wire_ms else ""
    gradients = f"{found.nbytes / 1e6:.1f} MB of gradients in {found.parameters} tensors"
    rounds = f"medians of {found.rounds} alternated rounds of {found.steps} steps"
    return [
        f"{_ddp_place(found)}, {reducers}: {gradients}",
        f"backward {found.backward_ms:.0f} ms, {wire}{rounds}",
    ]


def _ddp_gain(found: DdpResults) -> str:
    return f"samples/s, ours over the faster Gloo: {found.ours_over_gloo:.2f}"


def _ddp_weights(found: DdpResults) -> str:
    ours = found.rows[0]
    bits = "the same bits" if ours.identical else "DIFFERENT BITS"
    return f"weights: {bits} at all ranks, at most {ours.largest_difference:.1e} from Gloo's"


def _gigabytes_per_s(each: MicroBenchmark) -> float | None:
    nbytes = each.extra_info.get("nbytes")
    return None if nbytes is None else nbytes / each.stats.median / 1e9


def _change(values: tuple[int, int]) -> str:
    start, end = values
    return str(end) if start == end else f"{start} -> {end}"


# Pictures


def picture(found: Results | DdpResults) -> bytes:
    """Draw what a result shows; the PNG's bytes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (slow to load)

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    if isinstance(found, DdpResults):
        _draw_ddp(figure, found)
    elif found.soak:
        _draw_soak(figure, found.soak)
    elif found.kind == "scaling":
        _draw_scaling(figure, found)
    else:
        _draw_all_reduces(figure, found)
    with io.BytesIO() as png:
        figure.savefig(png, format="png", dpi=120)
        return png.getvalue()


def _draw_all_reduces(figure: Figure, results: Results) -> None:
    rates, times = figure.subplots(1, 2)
    sizes = sorted({row.nbytes for row in results.rows})
    for name in _names(results.rows):
        rows = [row for row in results.rows if row.contender == name]
        _series(rates, rows, "nbytes", name)
        style = "o-" if rows[0].ours else "s-"
        times.plot([row.nbytes for row in rows], [row.time_us / 1e3 for row in rows], style)
    for axes in (rates, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45)
        axes.set_xlabel("size")
    times.set_ylabel("time, ms")
    times.set_yscale("log")
    _finish_algbw(figure, [rates], f"{results.settings.workers[0]} workers", results.settings)


def _draw_scaling(figure: Figure, results: Results) -> None:
    over_workers, over_reducers = figure.subplots(1, 2)
    full = [row for row in results.rows if row.contender == f"pool-{row.workers}"]
    _series(over_workers, full, "workers", "pool, k = n")
    for name in _names(row for row in results.rows if not row.reducers):
        _series(over_workers, [r for r in results.rows if r.contender == name], "workers", name)
    over_workers.set_xlabel("workers (n)")
    for n in results.settings.workers:
        for kind in ("pool", "mixed"):
            some = [row for row in results.rows if row.workers == n and row.reducers]
            some = [row for row in some if row.contender.startswith(kind)]
            _series(over_reducers, some, "reducers", f"{kind}, n = {n}")
    over_reducers.set_xlabel("reducers (k)")
    sizes = ", ".join(size(nbytes) for nbytes in sorted({row.nbytes for row in results.rows}))
    _finish_algbw(figure, [over_workers, over_reducers], sizes, results.settings)


def _finish_algbw(figure: Figure, panels: list[Axes], what: str, settings: Settings) -> None:
    for axes in panels:
        axes.set_ylabel("algbw, MB/s")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    dotted = "; dotted: what the links allow" if settings.mbit else ""
    figure.suptitle(f"{what}{dotted}\n{conditions(settings)}", fontsize="medium")


def _series(axes: Axes, rows: list[Row], over: str, label: str) -> None:
    """Draw one line of algbw, and dotted what the links would allow."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: int(getattr(row, over)))
    positions = [getattr(row, over) for row in rows]
    style = "o-" if rows[0].ours else "s-"
    (drawn,) = axes.plot(positions, [row.algbw / 1e6 for row in rows], style, label=label)
    bounds = [(at, row.limit / 1e6) for at, row in zip(positions, rows, strict=True) if row.limit]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color=drawn.get_color())


def _draw_soak(figure: Figure, soak: Soak) -> None:
    memory, counts = figure.subplots(1, 2)
    for process in dict.fromkeys(sample.process for sample in soak.samples):
        samples = [sample for sample in soak.samples if sample.process == process]
        done = [sample.done for sample in samples]
        memory.plot(done, [sample.rss / MIB for sample in samples], label=process)
        (drawn,) = counts.plot(done, [sample.threads for sample in samples], label=process)
        color = drawn.get_color()
        counts.plot(done, [sample.files for sample in samples], "--", color=color)
    memory.set_ylabel("RSS, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    counts.set_ylabel("threads (solid), open files (dashed)")
    counts.set_ylim(bottom=0)
    for axes in (memory, counts):
        axes.set_xlabel("all-reduces")
    figure.suptitle(f"{soak.all_reduces:,} all-reduces of mixed sizes", fontsize="medium")


def _draw_ddp(figure: Figure, found: DdpResults) -> None:
    figure.set_size_inches(8, 1.2 + 0.6 * len(found.rows))
    axes = figure.subplots()
    names = [row.variant for row in found.rows]
    exposed = [max(0.0, row.exposed_ms) for row in found.rows]
    rest = [row.step_ms - late for row, late in zip(found.rows, exposed, strict=True)]
    axes.barh(names, rest, color="tab:gray", label="step without exchange")
    axes.barh(names, exposed, left=rest, color="tab:orange", label="exposed communication")
    marks = [
        (start + row.ideal_ms, row.variant)
        for start, row in zip(rest, found.rows, strict=True)
        if row.ideal_ms is not None
    ]
    axes.plot(*zip(*marks, strict=True), "k|", markersize=24, label="all-reduce minus backward")
    ends = dict.fromkeys(names, 0.0) | {name: at for at, name in marks}
    for row in found.rows:
        text = f"  {row.samples_per_s:.0f} samples/s"
        axes.annotate(text, (max(row.step_ms, ends[row.variant]), row.variant), va="center")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.set_title(_ddp_place(found))
    axes.legend(fontsize="small", markerscale=0.4, loc="lower right")


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.contender for row in rows))


# The page


class Page:
    """Headings, sentences, tables and pictures in order, as HTML and as Markdown.

    Args:
        folder: name of the folder, beside the page, with the pictures of Markdown.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._html = [f"<h1>{TITLE}</h1>"]
        self._markdown = [f"# {TITLE}"]
        self._pictures: dict[str, bytes] = {}

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading; 2 is the level below the title."""
        self._add(f"<h{level}>{escape(text)}</h{level}>", f"{'#' * level} {text}")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add(f"<p>{escape(text)}</p>", text)

    def points(self, texts: Sequence[str]) -> None:
        """Add a list."""
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        self._add(f"<ul>{items}</ul>", "\n".join(f"- {text}" for text in texts))

    def box(self, kind: str, text: str) -> None:
        """Add a sentence that nobody must overlook: an ``alarm``, or a ``warning``."""
        self._add(f'<p class="{kind}">{escape(text)}</p>', f"> **{text}**")

    def code(self, text: str) -> None:
        """Add lines as they are."""
        self._add(f"<pre>{escape(text)}</pre>", f"```\n{text}\n```")

    def table(self, columns: Sequence[Column], rows: Iterable[object], words: bool = False) -> None:
        """Add a table, of words or of numbers; the first column names the row."""
        same, shown, cells = [], [], []
        for column in columns:
            texts = [column.cell(row) for row in rows]
            if column.setting and len(set(texts)) == 1:
                same.append(f"{column.title} {texts[0]}")
            else:
                shown.append(column)
                cells.append(texts)
        caption, lines = ", ".join(same), list(zip(*cells, strict=True))
        titles, units = [column.title for column in shown], [column.unit for column in shown]
        head = [titles, units] if any(units) else [titles] if any(titles) else []
        self._add(
            ('<table class="words">' if words else "<table>")
            + (f"<caption>In all rows: {escape(caption)}</caption>" if caption else "")
            + f"<thead>{''.join(_html_row('th', texts) for texts in head)}</thead>"
            + f"<tbody>{''.join(_html_row('td', texts) for texts in lines)}</tbody></table>",
            f"In all rows: {caption}." if caption else "",
            _markdown_table(shown, lines, words=words),
        )

    def picture(self, png: bytes, what: str) -> None:
        """Add a picture; `what` is for those who do not see it."""
        data = base64.b64encode(png).decode()
        name = f"{len(self._pictures) + 1}.png"
        self._pictures[name] = png
        self._add(
            f'<p><img alt="{escape(what)}" src="data:image/png;base64,{data}"></p>',
            f"![{what}]({self._folder}/{name})",
        )

    def write(self, path: Path) -> None:
        """Write the page, as Markdown if the name ends in ``.md``, with its pictures beside it."""
        if path.suffix != ".md":
            path.write_text(self._whole_html())
            return
        folder = path.with_name(self._folder)
        folder.mkdir(exist_ok=True)
        for name, png in self._pictures.items():
            (folder / name).write_bytes(png)
        path.write_text("\n\n".join(self._markdown) + "\n")

    def _add(self, html: str, *markdown: str) -> None:
        self._html.append(html)
        self._markdown += [text for text in markdown if text]

    def _whole_html(self) -> str:
        head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>'
        start = f'<!doctype html>\n<html lang="en"><head>{head}</head>'
        return "\n".join([f"{start}<body>", *self._html, "</body></html>\n"])


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _markdown_table(
    columns: Sequence[Column], lines: Iterable[Sequence[str]], *, words: bool
) -> str:
    head = [", ".join(filter(None, (column.title, column.unit))) for column in columns]
    rule = ["---"] + ["---" if words else "---:"] * (len(columns) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


# Verdicts


def _all_reduce_place(found: Results) -> str:
    workers = ", ".join(map(str, found.settings.workers))
    return f"{workers} workers, {link(found.settings.mbit)}"


def _all_reduce_verdict(found: Results) -> Verdict:
    """Compare the best of ours with the best baseline, at most workers and the largest size."""
    rows = found.rows
    wrong, checked = sum(row.wrong for row in rows), sum(row.checked for row in rows)
    alarms = [
        f"{row.contender} at {size(row.nbytes, ' ')}: "
        f"{row.wrong:,} wrong elements of {row.checked:,} compared"
        for row in rows
        if row.wrong
    ]
    if not any(row.ours for row in rows):
        return Verdict("nothing to compare", [*alarms, "no all-reduce of ours was measured"])
    last = max((row.workers, row.nbytes) for row in rows if row.ours)
    rows = [row for row in rows if (row.workers, row.nbytes) == last]
    rows.sort(key=lambda row: -row.algbw)
    best = next(row for row in rows if row.ours)
    fastest = next((row for row in rows if not row.ours), None)
    if fastest is None:
        text = f"{best.contender} takes {best.time_us / 1e3:.2f} ms, with no baseline to compare it"
    else:
        text = f"{best.contender} is {best.algbw / fastest.algbw:.2f} times as fast as "
        text += fastest.contender
        if (per_card := best.card_ratios.get(fastest.contender)) is not None:
            text += f" ({per_card:.2f} times at equal cards)"
    if best.payload_share is not None:
        text += f", and reaches {best.payload_share:.3f} of the payload rate"
    workers, nbytes = last
    return Verdict(
        f"{size(nbytes, ' ')}, {workers} workers, {link(found.settings.mbit)}: {text}; "
        f"{wrong:,} wrong of {checked:,} elements compared in {len(found.rows)} results",
        alarms,
    )


def _soak_verdict(found: Results) -> Verdict:
    assert found.soak
    soak, alarms = found.soak, []
    if soak.wrong:
        alarms.append(f"{soak.wrong:,} wrong elements of {soak.checked:,} compared")
    if growing := _growing(soak):
        alarms.append(f"memory grows in {growing}")
    return Verdict(f"{_soaked(soak)}; {_growth(soak)}", alarms)


def _ddp_place(found: DdpResults) -> str:
    return f"{found.model}, {found.workers} workers, {link(found.mbit)}"


def _ddp_verdict(found: DdpResults) -> Verdict:
    rows = found.rows
    wrong, checked = sum(row.wrong for row in rows), sum(row.checked for row in rows)
    alarms = [f"{row.variant}: {row.wrong:,} wrong weights" for row in rows if row.wrong]
    different = [row.variant for row in rows if row.identical is False]
    alarms += [f"{variant}: ranks have different weights" for variant in different]
    gloo = " or ".join(row.variant for row in rows if row.variant.startswith("gloo"))
    faster = "the faster of " if " or " in gloo else ""
    return Verdict(
        f"{_ddp_place(found)}: {found.ours_over_gloo:.2f} times the samples/s of {faster}{gloo}; "
        f"{wrong:,} wrong weights of {checked:,}",
        alarms,
    )


def _chaos_place(found: ChaosResults) -> str:
    return f"{found.workers} workers, {found.reducers} reducers"


def _chaos_verdict(found: ChaosResults) -> Verdict:
    alarms = [f"{found.lost} of {found.steps:,} steps lost"] if found.lost else []
    if not found.identical:
        alarms.append("final weights differ between ranks, or from the undisturbed training's")
    weights = "equal" if found.identical else "DIFFER from"
    return Verdict(
        f"{_chaos_place(found)}: {found.kills} kills, {found.lost} of {found.steps:,} steps lost, "
        f"longest stall {found.stall_s:.2f} s; final weights {weights} the undisturbed training's",
        alarms,
    )


def _micro_verdict(found: MicroResults) -> Verdict:
    groups = len({each.group for each in found.benchmarks})
    text = f"{len(found.benchmarks)} benchmarks in {groups} groups, nothing to compare them with"
    return Verdict(text, [])


# Sections


def _fill_all_reduces(page: Page, found: Results) -> None:
    _conditions(page, found)
    page.table(ALL_REDUCE, found.rows)
    ours = [row for row in found.rows if row.ours]
    baselines = list(dict.fromkeys(name for row in ours for name in row.ratios))
    if baselines:
        page.text(COMPARISONS)
        columns = [column for column in ALL_REDUCE if column.title in {"contender", "n", "size"}]
        columns.insert(2, Column("cards", "", 0, lambda row: str(row.cards)))
        columns += _ratios(baselines, "ratios", "equal workers")
        if any(row.card_ratios for row in ours):
            columns += _ratios(baselines, "card_ratios", "equal cards")
        page.table(columns, ours)
    page.picture(picture(found), "algbw and time")


def _fill_soak(page: Page, found: Results) -> None:
    assert found.soak
    _conditions(page, found)
    page.table(TRENDS, found.soak.trends)
    page.picture(picture(found), "memory, open files and threads")


def _fill_ddp(page: Page, found: DdpResults) -> None:
    page.points([*_ddp_facts(found), _ddp_gain(found), _ddp_weights(found)])
    page.table(DDP, found.rows)
    page.picture(picture(found), "a step's time by variant")


def _fill_chaos(page: Page, found: ChaosResults) -> None:
    page.table(PAIR, [(name, cell(found)) for name, cell in CHAOS.items()])


def _fill_micro(page: Page, found: MicroResults) -> None:
    for group in dict.fromkeys(each.group for each in found.benchmarks):
        page.heading(group or "without a group", 3)
        each_of = [each for each in found.benchmarks if each.group == group]
        with_speed = any(_gigabytes_per_s(each) is not None for each in each_of)
        page.table(MICRO if with_speed else MICRO[:-1], each_of)


def _conditions(page: Page, found: Results) -> None:
    page.text(f"Conditions: {conditions(found.settings)}.")
    if found.settings.mbit is None:
        page.text(NO_CARDS)
    for name, why in found.settings.skipped.items():
        page.text(f"{name} was not measured: {why}")


ALL_REDUCES = ("All-reduces", _all_reduce_place, _all_reduce_verdict, _fill_all_reduces)
SECTIONS = {
    "allreduce": Section("All-reduces", *ALL_REDUCES),
    "scaling": Section("Scaling", *ALL_REDUCES),
    "soak": Section("Soak", "Soak", _all_reduce_place, _soak_verdict, _fill_soak),
    "ddp": Section("DDP end to end", "DDP end to end", _ddp_place, _ddp_verdict, _fill_ddp),
    "chaos": Section(
        "Reducers that die", "Reducers that die", _chaos_place, _chaos_verdict, _fill_chaos
    ),
    "micro": Section("Micro-benchmarks", "The report", lambda _: "", _micro_verdict, _fill_micro),
}


def compose(results: Sequence[AnyResults], folder: str) -> Page:
    """Return the page of some results; `folder` is that of `Page`."""
    page = Page(folder)
    verdicts = [verdict(found) for found in results]
    for found, (_, alarms) in zip(results, verdicts, strict=True):
        for alarm in alarms:
            page.box("alarm", f"FAILED: {_title(found)}: {alarm}")
    pairs = zip(results, verdicts, strict=True)
    page.points([f"{SECTIONS[found.kind].title}: {text}." for found, (text, _) in pairs])
    for found in results:
        if warning := _busy(found):
            page.box("warning", f"{_title(found)}: {warning}.")
    for found in results:
        page.heading(_title(found))
        _origin(page, found)
        SECTIONS[found.kind].fill(page, found)
    page.heading("Machine")
    for facts, titles in _machines(results).items():
        if len(titles) < len(results):
            page.text(f"{'; '.join(titles)}:")
        page.table(PAIR, facts, words=True)
    page.heading("Glossary")
    for source in dict.fromkeys(SECTIONS[found.kind].terms for found in results):
        page.heading(source, 3)
        page.table(PAIR, terms(source), words=True)
    return page


def verdict(found: AnyResults) -> Verdict:
    return SECTIONS[found.kind].verdict(found)


def terms(section: str) -> list[tuple[str, str]]:
    """Return terms and meanings from the tables of a section of README.md with these columns."""
    text = README.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\| \w+ \| meaning \|\n\|[-|]+\n((?:\|.+\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    return [(term, meaning) for term, meaning in map(_cells, rows)]


def _cells(row: str) -> list[str]:
    """Return the cells of a Markdown table's row, without marks and links."""
    plain = re.sub(r"\*\*|`|\[([^\]]+)\]\([^)]+\)", r"\1", row)
    return plain.removeprefix("| ").removesuffix(" |").split(" | ")


def _title(found: AnyResults) -> str:
    section = SECTIONS[found.kind]
    place = section.place(found)
    return f"{section.title}, {place}" if place else section.title


def _busy(found: AnyResults) -> str:
    if not isinstance(found, MicroResults):
        return busy(found.load, found.machine.cores)
    info = found.machine_info
    return busy(info.get("load", 0.0), info["cpu"]["count"])


def _origin(page: Page, found: AnyResults) -> None:
    if isinstance(found, MicroResults):
        page.text(f"Measured at {found.time.isoformat()} by pytest-benchmark {found.version}.")
        if "load" not in found.machine_info:
            page.text("The file does not say whether the machine was busy.")
        return
    page.code(found.command)
    page.text(f"Measured at {found.time.isoformat()}.")
    for name, value in found.environment.items():
        page.text(f"{name}={value}")


def _machines(results: Sequence[AnyResults]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for found in results:
        machines.setdefault(tuple(_facts(found).items()), []).append(_title(found))
    return machines


def _facts(found: AnyResults) -> dict[str, str]:
    if isinstance(found, MicroResults):
        info, cpu = found.machine_info, found.machine_info.get("cpu", {})
        return {
            "CPU": f"{cpu.get('count', '?')} cores of {cpu.get('brand_raw', '?')}",
            "Linux": info.get("release", "?"),
            "Python": info.get("python_version", "?"),
            "commit": found.commit_info.get("id", "?"),
        }
    machine = found.machine
    return {
        "CPU": f"{machine.cores} cores of {machine.cpu}",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "Linux": machine.kernel,
        "Python": machine.python,
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "commit": machine.commit,
    }


def main(
    files: Annotated[list[Path], typer.Argument(help="Results as JSON.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page, .html or .md.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one page of all results."""
    page = compose([_read(path) for path in files], f"{output.stem}-pictures")
    page.write(output)
    print(f"{output}: {len(files)} results")


def _read(path: Path) -> AnyResults:
    try:
        return read(path)
    except (OSError, KeyError, ValueError) as error:  # pydantic's are ValueErrors
        problem = f"{type(error).__name__}: {error}"
        sys.exit(f"bench.report: {path} is no result of these benchmarks: {problem}")


if __name__ == "__main__":
    typer.run(main)
