"""The short run of all benchmarks; here only which commands it runs."""

import shlex
import sys
from importlib import import_module

import pytest
import typer
from _pytest.config.argparsing import Parser

from bench import __main__ as short


@pytest.mark.parametrize("step", short.STEPS, ids=lambda step: step.name)
def test_every_command_exists_with_its_options(step, tmp_path):
    module, *options = shlex.split(f"{step.command} {step.outputs.format(tmp_path / 'found')}")
    if module == "pytest":
        plugin = pytest.importorskip("pytest_benchmark.plugin")
        parser = Parser(_ispytest=True)
        plugin.pytest_addoption(parser)
        known, unknown = parser.parse_known_and_unknown_args(options)
        assert (known.file_or_dir, unknown) == (["bench/micro"], [])
        return
    app = typer.Typer()
    app.command()(import_module(module).main)
    assert typer.main.get_command(app).make_context(module, options)


@pytest.mark.parametrize("obstacle", ["", "no root"])
def test_what_fails_or_cannot_run_is_said_and_the_rest_goes_on(
    obstacle, tmp_path, monkeypatch, capsys
):
    commands = []

    def run(command):
        commands.append(command)
        if "bench/micro" in command:
            return 1
        for word in shlex.split(command.partition("json ")[2])[:1]:
            short.Path(word).touch()
        return 0

    monkeypatch.setattr(sys, "argv", ["bench"])  # it has no options of pytest's
    monkeypatch.setattr(short, "RESULTS", tmp_path)
    monkeypatch.setattr(short, "run", run)
    monkeypatch.setattr(short, "why_unshaped", lambda: obstacle)
    assert short.main() == 1
    left = [step for step in short.STEPS if not (obstacle and step.shaped)]
    assert commands[:-1] == [
        f"{step.command} {step.outputs.format(tmp_path / step.name)}" for step in left
    ]
    reported = [f"{tmp_path}/{step.name}.json" for step in left if step.name != "micro"]
    assert commands[-1].split()[1:-2] == reported
    said = capsys.readouterr().out
    assert "failed: micro" in said
    assert ("no root" in said) == bool(obstacle)


def test_without_iperf3_links_are_not_shaped(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "iperf3" in short.why_unshaped()
