"""One page from results: tables, pictures, the machine's facts.

    python -m bench.report results/*.json -o report.html

It takes the files of all benchmarks here, and writes Markdown where the output's name ends in
``.md``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import chaos_figures, ddp_figures, ddp_plot, kernels, plots, tables
from bench.page import Page
from bench.results import Machine, Results, Row

if TYPE_CHECKING:
    from collections.abc import Callable

TITLES = {
    "allreduce": "All-reduces",
    "scaling": "Scaling",
    "soak": "Soak",
    "ddp": "DDP end to end",
    "chaos": "Reducers that die",
    "kernels": "Kernels",
}
PER_WORKER = (
    "At equal worker count: algbw over each baseline's. A pool of k reducers brings k further "
    "network cards; that is what it is for, but not for free."
)
PER_CARD = (
    "At equal total bandwidth: the same per network card (algbw times workers over cards of both), "
    "as if the baseline's workers had the reducers' cards instead. Below 1, the cards would do "
    "more there, if workers could have them."
)
NO_CARDS = (
    "All hosts share this machine's processors, the reducers' too, and no network card limits "
    "anything: these figures tell what an all-reduce costs processors, not what a network allows."
)


def main(
    files: Annotated[list[Path], typer.Argument(help="Results as JSON.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page, .html or .md.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one page of all results."""
    page = Page("Benchmarks of the reduction server", f"{output.stem}-pictures")
    for path in files:
        problem = _attempt(page, path)
        if problem:
            sys.exit(f"bench.report: {path} is no result of these benchmarks: {problem}")
    page.write(output)
    print(f"{output}: {len(files)} results")


def _attempt(page: Page, path: Path) -> str:
    try:
        add(page, json.loads(path.read_text()))
    except (OSError, KeyError, ValueError) as error:  # pydantic's are ValueErrors
        return f"{type(error).__name__}: {error}"
    return ""


def add(page: Page, result: dict[str, Any]) -> None:
    """Add what one file holds.

    Raises:
        KeyError, ValueError: it is not of the schema.
    """
    kind = result["kind"]
    page.heading(TITLES[kind])
    if kind == "ddp":
        ddp = ddp_figures.DdpResults.model_validate(result)
        _origin(page, ddp.command, ddp.time.isoformat())
        page.code(ddp_figures.table(ddp))
        page.picture(_drawn(lambda path: ddp_plot.plot(ddp, path)), "a step's time by variant")
        _machine(page, ddp.machine)
        return
    if kind == "chaos":
        chaos = chaos_figures.ChaosResults.model_validate(result)
        _origin(page, chaos.command, chaos.time.isoformat())
        page.code(chaos_figures.table(chaos))
        _machine(page, chaos.machine)
        return
    if kind == "kernels":
        found = kernels.KernelsResults.model_validate(result)
        _origin(page, found.command, found.time.isoformat())
        page.code(kernels.table(found))
        page.picture(_drawn(lambda path: kernels.draw(found, path)), "kernels' speed by size")
        _machine(page, found.machine)
        return
    results = Results.model_validate(result)
    settings = results.settings
    _origin(page, settings.command, results.time.isoformat())
    page.text(f"Conditions: {tables.conditions(settings)}.")
    if settings.mbit is None:
        page.text(NO_CARDS)
    for name, value in settings.environment.items():
        page.text(f"{name}={value}")
    if results.soak:
        page.text(tables.soak_summary(results.soak))
        trends = [tables.trend_cells(trend) for trend in results.soak.trends]
        page.table(tables.SOAK_COLUMNS, trends)
        page.text(tables.soak_verdict(results.soak) + ". Sizes in MiB, slope in KiB per 1000.")
    else:
        _rows(page, results.rows)
    for name, why in settings.skipped.items():
        page.text(f"{name} was not measured: {why}")
    page.picture(plots.draw(results), TITLES[kind])
    _machine(page, results.machine)


def _rows(page: Page, rows: list[Row]) -> None:
    titles = [
        f"{title}, {tables.UNITS[title]}" if title in tables.UNITS else title
        for title, _ in tables.COLUMNS
    ]
    page.table(titles, [tables.cells(row) for row in rows])
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    if not baselines:
        return
    head = ["contender", "n", "cards", "size", *(f"x {name}" for name in baselines)]
    comparisons: list[tuple[str, Callable[[Row], dict[str, float]]]]
    comparisons = [(PER_WORKER, lambda row: row.ratios)]
    if any(row.card_ratios for row in rows):
        comparisons.append((PER_CARD, lambda row: row.card_ratios))
    for text, ratios in comparisons:
        page.text(text)
        page.table(
            head,
            [
                [
                    row.contender,
                    str(row.workers),
                    str(row.cards),
                    tables.size(row.nbytes),
                    *(tables.ratio(ratios(row).get(name)) for name in baselines),
                ]
                for row in rows
                if row.ours
            ],
        )


def _origin(page: Page, command: str, time: str) -> None:
    page.code(command)
    page.text(f"Measured at {time}.")


def _machine(page: Page, machine: Machine) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    facts = {
        "CPU": f"{machine.cores} cores of {machine.cpu}",
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "Linux": machine.kernel,
        "Python": machine.python,
        "versions": versions,
        "commit": machine.commit,
    }
    page.table(["machine", ""], [[name, value] for name, value in facts.items()])


def _drawn(draw: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.png")
        draw(path)
        return path.read_bytes()


if __name__ == "__main__":
    typer.run(main)
