"""Pictures of results, as PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from bench.contenders import Contender
from bench.tables import conditions, size
from bench.theory import limit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.results import Results, Row, Soak

MIB = 1 << 20


def draw(results: Results) -> bytes:
    """Draw what a result shows; the PNG's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to load)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    if results.soak:
        _soak(figure, results.soak)
    elif results.kind == "scaling":
        _scaling(figure, results)
    else:
        _all_reduce(figure, results)
    with io.BytesIO() as png:
        figure.savefig(png, format="png", dpi=120)
        return png.getvalue()


def _all_reduce(figure: Figure, results: Results) -> None:
    rates, times = figure.subplots(1, 2)
    sizes = sorted({row.nbytes for row in results.rows})
    for name in _names(results.rows):
        rows = [row for row in results.rows if row.contender == name]
        style = _style(rows[0])
        (line,) = rates.plot(
            [row.nbytes for row in rows], [row.algbw / 1e6 for row in rows], style, label=name
        )
        times.plot(
            [row.nbytes for row in rows],
            [row.time_us / 1e3 for row in rows],
            style,
            color=line.get_color(),
            label=name,
        )
    workers = results.settings.workers[0]
    for rate in results.settings.payload_rates:
        pools = {row.reducers for row in results.rows if row.contender.startswith("pool")}
        pools_or_full = sorted(pools) or [workers]
        bounds = {f"pool-{k}": Contender("pool", k) for k in pools_or_full}
        bounds["ring"] = Contender("ring")
        for (name, contender), style in zip(bounds.items(), ("--", ":", "-.", "--"), strict=False):
            best = limit(contender, workers, rate)
            rates.axhline(best / 1e6, color="gray", linestyle=style, label=f"limit, {name}")
            bound_times = [1e3 * nbytes / best for nbytes in sizes]
            times.plot(sizes, bound_times, linestyle=style, color="gray", label=f"limit, {name}")
    for axes in (rates, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45)
        axes.set_xlabel("size")
    rates.set_ylabel("algbw, MB/s")
    rates.set_ylim(bottom=0)
    times.set_ylabel("time, ms")
    times.set_yscale("log")
    rates.legend(fontsize="small")
    figure.suptitle(f"{workers} workers\n{conditions(results.settings)}", fontsize="medium")


def _scaling(figure: Figure, results: Results) -> None:
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
    for axes in (over_workers, over_reducers):
        axes.set_ylabel("algbw, MB/s")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    sizes = ", ".join(size(nbytes) for nbytes in sorted({row.nbytes for row in results.rows}))
    title = f"{sizes}; dotted: what the links allow\n{conditions(results.settings)}"
    figure.suptitle(title, fontsize="medium")


def _series(axes: Axes, rows: list[Row], over: str, label: str) -> None:
    """Draw one line of algbw, and dotted what the links would allow."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: int(getattr(row, over)))
    positions = [getattr(row, over) for row in rows]
    (line,) = axes.plot(positions, [row.algbw / 1e6 for row in rows], "o-", label=label)
    bounds = [(at, row.limit / 1e6) for at, row in zip(positions, rows, strict=True) if row.limit]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), ":", color=line.get_color())


def _soak(figure: Figure, soak: Soak) -> None:
    memory, counts = figure.subplots(1, 2)
    for process in dict.fromkeys(sample.process for sample in soak.samples):
        samples = [sample for sample in soak.samples if sample.process == process]
        done = [sample.done for sample in samples]
        memory.plot(done, [sample.rss / MIB for sample in samples], label=process)
        (line,) = counts.plot(done, [sample.threads for sample in samples], label=process)
        color = line.get_color()
        counts.plot(done, [sample.files for sample in samples], "--", color=color)
    memory.set_ylabel("RSS, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    counts.set_ylabel("threads (solid), open files (dashed)")
    counts.set_ylim(bottom=0)
    for axes in (memory, counts):
        axes.set_xlabel("all-reduces")
    figure.suptitle(f"{soak.all_reduces:,} all-reduces of mixed sizes", fontsize="medium")


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.contender for row in rows))


def _style(row: Row) -> Any:
    return "o-" if row.ours else "s-"
