"""Commands of benchmarks, as pages show them, are what the benchmarks take; none is run here."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer

from bench import __main__ as short

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
        if module != "torture.failpoints"  # what it takes is another module's command
    }
)


def check(module, options):
    app = typer.Typer()
    app.command()(import_module(module).main)
    assert typer.main.get_command(app).make_context(module, options)


@pytest.mark.extended
@pytest.mark.parametrize(("module", "arguments"), SHOWN)
def test_a_benchmark_takes_the_arguments_that_are_shown(module, arguments):
    check(module, shlex.split(arguments))


STEPS = [step for step in short.STEPS if step.name != "micro"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_benchmark_takes_the_options_of_the_short_run(step, tmp_path):
    module, *options = shlex.split(f"{step.command} {step.outputs.format(tmp_path / 'found')}")
    check(module, options)
