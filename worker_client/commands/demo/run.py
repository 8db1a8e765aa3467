"""The demo's story: train twice, compare, show."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from reducer.errors import ConfigError
from reducer.pool import local_pool
from worker_client.commands.demo import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCURACY_BAR = 0.95
PACKAGES = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
BATCH = 16  # images per rank and step


@dataclass
class DemoRun:
    """What one training showed."""

    losses: list[float] = field(default_factory=list)  # mean over the ranks, by step
    ends: list[dict[str, Any]] = field(default_factory=list)  # each rank's last report
    # Rank 0's final ones, flat.
    weights: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def accuracy(self) -> float:
        """Share of the test images that rank 0 names rightly."""
        return float(self.ends[0]["accuracy"])

    @property
    def identical(self) -> bool:
        """Whether all ranks ended with the same bits."""
        return len({end["digest"] for end in self.ends}) == 1


def demo(*, workers: int, reducers: int, epochs: int, plot_to: Path) -> int:
    """Train through reducers and through Gloo, print the comparison, draw the loss curves.

    Returns:
        The exit code: 0, or 1 if a run's accuracy is below 95 % or its ranks differ in any bit.

    Raises:
        ConfigError: a package of the demo is not installed, or an argument is out of range.
        ReductionError: a worker failed.
    """
    _check(workers, reducers, epochs)
    _check_file(plot_to)
    _check_installed()
    # Ends the workers first, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console()
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        with ExitStack() as stack:
            servers = stack.enter_context(local_pool(reducers)) if reducers else []
            ours = _train(progress, "through reducers", workers, servers, epochs, reduced=True)
        gloo = _train(progress, "through Gloo", workers, [], epochs, reduced=False)
    console.print(_table(ours, gloo, workers, reducers))
    _draw({"reducers": ours.losses, "Gloo": gloo.losses}, plot_to)
    console.print(f"Loss curves: {plot_to}")
    failures = [*_failures("through reducers", ours), *_failures("through Gloo", gloo)]
    for failure in failures:
        console.print(f"[red]Failed: {failure}")
    return 1 if failures else 0


def _train(
    progress: Progress,
    title: str,
    workers: int,
    servers: list[str],
    epochs: int,
    *,
    reduced: bool,
) -> DemoRun:
    run = DemoRun(ends=[{} for _ in range(workers)])
    by_rank: list[list[float]] = [[] for _ in range(workers)]
    task = progress.add_task(title, total=None, loss="")
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights.npy")
        spec = {
            "through_reducers": reduced,
            "epochs": epochs,
            "batch": BATCH,
            "weights_to": str(weights),
        }
        with closing(ranks.run(workers, servers, spec)) as reports:
            for said in reports:
                if said["event"] == "end":
                    run.ends[said["rank"]] = said
                    continue
                by_rank[said["rank"]].append(said["loss"])
                if said["rank"] == 0:
                    loss = f"loss {said['loss']:.3f}"
                    progress.update(task, total=said["of"], loss=loss, advance=1)
        run.weights = np.load(weights)
    run.losses = [float(np.mean(losses)) for losses in zip(*by_rank, strict=True)]
    return run


def _table(ours: DemoRun, gloo: DemoRun, workers: int, reducers: int) -> Table:
    pool = f"{reducers} reducer{'s' * (reducers > 1)}" if reducers else "embedded reducers"
    table = Table(title=f"{workers} DDP workers, handwritten digits")
    table.add_column("")
    table.add_column(pool, justify="right")
    table.add_column("Gloo", justify="right")
    table.add_row("test accuracy", *(f"{100 * run.accuracy:.1f} %" for run in (ours, gloo)))
    speeds = (f"{run.ends[0]['samples_per_s']:,.0f}" for run in (ours, gloo))
    table.add_row("samples/s", *speeds)
    table.add_row("bytes reduced per worker", f"{ours.ends[0]['bytes_reduced']:,}", "-")
    table.add_row(
        "ranks identical to the bit", *("yes" if r.identical else "NO" for r in (ours, gloo))
    )
    difference = float(np.abs(ours.weights - gloo.weights).max())
    table.add_row("largest weight difference to Gloo", f"{difference:.2e}", "-")
    return table


def _failures(title: str, run: DemoRun) -> Iterator[str]:
    if not run.identical:
        digests = ", ".join(f"rank {end['rank']} {end['digest'][:8]}" for end in run.ends)
        yield f"{title}, the ranks' final weights differ: {digests}."
    if run.accuracy < ACCURACY_BAR:
        yield (
            f"{title}, the test accuracy is {100 * run.accuracy:.1f} %, "
            f"below {100 * ACCURACY_BAR:.0f} %: more --epochs raise it."
        )


def _draw(curves: dict[str, list[float]], path: Path) -> None:
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


def _check(workers: int, reducers: int, epochs: int) -> None:
    if not 1 <= workers <= 16:
        raise ConfigError(f"--workers must be between 1 and 16, got {workers}")
    if not 0 <= reducers <= 16:
        raise ConfigError(f"--reducers must be between 0 and 16, got {reducers}")
    if epochs < 1:
        raise ConfigError(f"--epochs must be at least 1, got {epochs}")


def _check_file(plot_to: Path) -> None:
    folder = plot_to.parent
    if plot_to.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--plot {plot_to} cannot be written: name a file in a folder of yours")


def _check_installed() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        names = ", ".join(PACKAGES[name] for name in missing)
        checkout = Path(__file__).parents[3]
        here = (checkout / "pyproject.toml").is_file()
        what = f"{checkout}[demo]" if here else "reduction-server[demo]"
        raise ConfigError(f'the demo needs {names}: pip install "{what}"')
