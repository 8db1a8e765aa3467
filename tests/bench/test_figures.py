"""Figures that documents repeat: their commands, and what a file has of a result."""

import json
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import figures, results
from bench.results import TableResults
from tests.bench.test_shown_commands import check

FOUND = Path(__file__).with_name("results")
APP = typer.Typer()
APP.command()(figures.main)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figures_command_is_understood(name):
    module, *options = shlex.split(figures.FIGURES[name])
    check(module, [*options, "--json", "found.json"])


def test_a_file_has_speeds_beside_the_fastest_of_each_kind():
    found = results.read(FOUND / "allreduce.json")
    pool, gloo, mpi = (
        next(row for row in found.rows if (row.contender, row.nbytes) == (name, 4096))
        for name in ("pool-4", "gloo", "mpi")
    )
    pool.rounds_us, gloo.rounds_us = [100.0, 125.0, 200.0], [200.0, 375.0, 220.0]
    ring = mpi.model_copy(update={"contender": "mpi-ring", "time_us": 50.0})
    ring.rounds_us, found.rows = [50.0, 50.0, 50.0], [pool, gloo, mpi, ring]
    written = json.loads(figures.text("pool-4", found))
    assert written["commit"] == "0123456789ab"
    assert written["date"] == "2026-01-02"
    assert written["command"] == f"python -m {figures.FIGURES['pool-4']}"
    assert written["machine"] == "2 cores of AMD EPYC, 24 GiB"
    ours, *others = written["rows"]
    assert (ours["way"], ours["size"], ours["reducers_cpu"]) == ("pool-4", "4 KiB", 12.34)
    assert ours["gloo"] == [2.0, 1.1, 3.0]
    assert (ours["mpi"], ours["mpi_way"]) == ([0.4, 0.25, 0.5], "mpi-ring")
    assert [row["way"] for row in others] == ["gloo", "mpi", "mpi-ring"]
    assert not any("gloo" in row for row in others)


def test_a_file_has_what_a_training_gains():
    found = results.read(FOUND / "ddp.json")
    ours, *others = (row for row in found.rows if row.variant != "no-op")
    ours.rounds_ms = [100.0, 100.0, 100.0]
    for row in others:
        row.rounds_ms, row.samples_per_s = [130.0, 150.0, 160.0], 94.8
    (row,) = json.loads(figures.text("ddp", found))["rows"]
    assert (row["gloo"], row["gloo_samples"]) == ([1.5, 1.3, 1.6], 94.8)
    assert row["samples"] == pytest.approx(ours.samples_per_s, rel=1e-3)


@pytest.mark.parametrize(
    ("commit", "load", "said"),
    [
        ("abc", 0.1, ""),
        ("abc", 1.7, "the machine was busy"),
        ("abc+", 0.1, "commit your changes first"),
    ],
)
def test_a_busy_machine_and_a_changed_tree_measure_no_figure(
    commit, load, said, monkeypatch, tmp_path
):
    run = results.read(FOUND / "ddp.json")
    machine = run.machine.model_copy(update={"commit": commit})
    kept = {name: getattr(run, name) for name in ("time", "command", "environment")}
    rows = [{"way": "flat", "s": 5.77123}]

    def measured(command, **_):
        found = TableResults(**kept, machine=machine, load=load, rows=rows)
        found.write(Path(command[command.index("--json") + 1]))
        return figures.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(figures, "FILES", tmp_path)
    monkeypatch.setattr(figures.subprocess, "run", measured)
    monkeypatch.setattr(figures.results, "machine", lambda: machine)
    ended = CliRunner().invoke(APP, ["nodes"])
    written = tmp_path / "nodes.json"
    assert (ended.exit_code, written.is_file()) == (int(bool(said)), not said)
    if said:
        assert said in str(ended.exception) + ended.output
    else:
        assert json.loads(written.read_text())["rows"] == [{"way": "flat", "s": 5.771}]


def test_without_names_it_lists_figures_and_refuses_what_is_none():
    listed = CliRunner().invoke(APP, [])
    assert listed.output.count("python -m bench.") == len(figures.FIGURES)
    refused = CliRunner().invoke(APP, ["pool-5"])
    assert refused.exit_code == 2
    assert "pool-5" in refused.output
