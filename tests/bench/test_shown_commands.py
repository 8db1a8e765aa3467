"""Commands of benchmarks, as pages show them, are what the benchmarks take; none is run here."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

pytest.importorskip("torch", reason="needs torch")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md", *(ROOT / "docs").rglob("*.md")]
SHOWN = sorted(
    {
        (module, arguments.strip())
        for page in PAGES
        for module, arguments in re.findall(
            r"-m ((?:bench|hostile|torture)\.[a-z_]+)\b([^`\n#|]*)",
            page.read_text().replace("\\\n", " "),
        )
        if "[" not in arguments  # a synopsis
    }
)


@pytest.mark.extended
@pytest.mark.parametrize(("module", "arguments"), SHOWN)
def test_a_benchmark_takes_the_arguments_that_are_shown(module, arguments):
    app = typer.Typer()
    app.command()(import_module(module).main)
    typer.main.get_command(app).make_context(module, shlex.split(arguments))
