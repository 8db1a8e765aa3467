"""Rows as text: columns like those of nccl-tests, one line per contender and size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.results import Row, Settings, Soak, Trend

MIB = 1 << 20
ENDS = (min, max)

# Title and width; README.md defines the columns.
COLUMNS = (
    ("contender", 12),
    ("n", 3),
    ("k", 3),
    ("size", 8),
    ("count", 9),
    ("type", 7),
    ("redop", 5),
    ("iters", 6),
    ("time", 10),
    ("mean", 10),
    ("p99", 10),
    ("algbw", 8),
    ("busbw", 8),
    ("#wrong", 6),
    ("/payload", 8),
    ("/limit", 7),
    ("cpu/GB", 7),
    ("red/GB", 7),
)
UNITS = {"time": "us", "mean": "us", "p99": "us", "algbw": "MB/s", "busbw": "MB/s"}
SOAK_COLUMNS = ("2nd half", "RSS, start", "RSS, end", "slope", "growth", "files", "threads", "")
UNITS |= {"cpu/GB": "s", "red/GB": "s"}


def conditions(settings: Settings) -> str:
    """Say in one sentence what limited the figures."""
    busy = f"; load average at the start {settings.load:.1f}" if settings.load >= 1 else ""
    if settings.mbit is None:
        return f"unshaped, so that processors are the limit{busy}"
    rates = " to ".join(dict.fromkeys(f"{end(settings.payload_rates) / 1e6:.2f}" for end in ENDS))
    return f"links of {settings.mbit:g} Mbit/s each way, {rates} MB/s of payload by iperf3{busy}"


def heading(baselines: list[str]) -> str:
    """Return the two lines above the rows."""
    columns = [*COLUMNS, *((f"x {name}", 8) for name in baselines)]
    lines = (
        " ".join(f"{title:>{width}}" for title, width in columns),
        " ".join(f"{UNITS.get(title, ''):>{width}}" for title, width in columns),
    )
    return "\n".join(line.rstrip() for line in lines)


def line(row: Row, baselines: list[str]) -> str:
    """Return one row, with its ratio to each baseline."""
    columns = [*COLUMNS, *((f"x {name}", 8) for name in baselines)]
    values = [*cells(row), *(ratio(row.ratios.get(name)) for name in baselines)]
    pairs = zip(values, columns, strict=True)
    return " ".join(f"{value:>{width}}" for value, (_, width) in pairs)


def cells(row: Row) -> list[str]:
    """Return the values of `COLUMNS` as text; ``-`` is for what was not measured."""
    limit = row.algbw / row.limit if row.limit else None
    return [
        row.contender,
        str(row.workers),
        str(row.reducers),
        size(row.nbytes),
        str(row.count),
        row.dtype,
        row.op,
        str(row.iterations),
        f"{row.time_us:.1f}",
        f"{row.mean_us:.1f}",
        f"{row.p99_us:.1f}",
        f"{row.algbw / 1e6:.2f}",
        f"{row.busbw / 1e6:.2f}",
        str(row.wrong),
        share(row.payload_share),
        share(limit),
        f"{row.worker_cpu_s_per_gb:.2f}",
        "-" if row.reducer_cpu_s_per_gb is None else f"{row.reducer_cpu_s_per_gb:.2f}",
    ]


def soak(found: Soak) -> str:
    """Return the figures of a soak."""
    width = (11, 11, 8, 18, 8, 11, 11, 6)
    heads = [SOAK_COLUMNS, ("", "MiB", "MiB", "KiB/1000", "MiB", "", "", "")]
    rows = [*heads, *(trend_cells(trend) for trend in found.trends)]
    lines = [
        " ".join(f"{value:>{size}}" for value, size in zip(row, width, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([soak_summary(found), *lines, soak_verdict(found)])


def soak_summary(found: Soak) -> str:
    """Say how much was done and compared."""
    return (
        f"{found.all_reduces:,} all-reduces, {found.nbytes / 1e9:.1f} GB per rank, "
        f"{found.seconds:.0f} s; {found.wrong} wrong of {found.checked:,} elements compared"
    )


def soak_verdict(found: Soak) -> str:
    """Say whether memory is flat, and by how much it grew at most."""
    growth = max(trend.growth for trend in found.trends) / MIB
    growing = [trend.process for trend in found.trends if not trend.flat]
    verdict = f"memory grows in {', '.join(growing)}" if growing else "memory is flat"
    return f"{verdict}: over the second half at most {growth:+.2f} MiB"


def trend_cells(trend: Trend) -> list[str]:
    """Return the values of `SOAK_COLUMNS` as text."""
    return [
        trend.process,
        f"{trend.start_rss / MIB:.2f}",
        f"{trend.end_rss / MIB:.2f}",
        f"{trend.bytes_per_1000 / 1024:.3f}",
        f"{trend.growth / MIB:.2f}",
        _change(trend.files),
        _change(trend.threads),
        "flat" if trend.flat else "grows",
    ]


def size(nbytes: int) -> str:
    """Return a size with the largest binary unit that leaves a whole number."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes}B"


def share(value: float | None) -> str:
    """Return a share such as ``0.972``."""
    return "-" if value is None else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """Return a ratio such as ``1.72x``."""
    return "-" if value is None else f"{value:.2f}x"


def _change(values: tuple[int, int]) -> str:
    start, end = values
    return str(end) if start == end else f"{start} -> {end}"
