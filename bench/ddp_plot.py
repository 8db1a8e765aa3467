"""The picture of `bench.ddp`: where a step's time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.ddp_figures import DdpResults


def plot(results: DdpResults, path: Path) -> None:
    """Draw a bar per variant: the step without exchange, exposed communication, the ideal."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (slow to load)

    figure = Figure(figsize=(8, 1.2 + 0.6 * len(results.rows)), layout="constrained")
    axes = figure.subplots()
    names = [row.variant for row in results.rows]
    exposed = [max(0.0, row.exposed_ms) for row in results.rows]
    rest = [row.step_ms - late for row, late in zip(results.rows, exposed, strict=True)]
    axes.barh(names, rest, color="tab:gray", label="step without exchange")
    axes.barh(names, exposed, left=rest, color="tab:orange", label="exposed communication")
    marks = [
        (start + row.ideal_ms, row.variant)
        for start, row in zip(rest, results.rows, strict=True)
        if row.ideal_ms is not None
    ]
    axes.plot(*zip(*marks, strict=True), "k|", markersize=24, label="all-reduce minus backward")
    ends = dict.fromkeys(names, 0.0) | {name: at for at, name in marks}
    for row in results.rows:
        text = f"  {row.samples_per_s:.0f} samples/s"
        axes.annotate(text, (max(row.step_ms, ends[row.variant]), row.variant), va="center")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    rate = results.mbit
    link = "unshaped links" if rate is None else f"{rate:g} Mbit/s"
    axes.set_title(f"{results.model}, {results.workers} DDP workers, {link}")
    axes.legend(fontsize="small", markerscale=0.4, loc="lower right")
    figure.savefig(path, dpi=120)
