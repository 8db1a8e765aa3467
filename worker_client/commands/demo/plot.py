"""The demo's picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def losses(curves: dict[str, list[float]], path: Path) -> None:
    """Draw loss over step, one line per run, into a PNG; a second panel shows the difference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (slow to load)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for style, (name, values) in zip(("-", ":"), curves.items(), strict=True):
        above.plot(values, style, label=name, linewidth=2)
    above.set_yscale("log")
    above.set_ylabel("training loss")
    above.set_title("Handwritten digits: the same training through reducers and through Gloo")
    above.legend()
    first, second = curves.values()
    below.plot([abs(a - b) for a, b in zip(first, second, strict=True)], color="gray")
    below.set_ylabel("|difference|")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)
