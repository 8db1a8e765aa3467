"""Whole runs of the benchmarks with real processes, short ones; and their arithmetic."""

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from bench import options, plan, report, theory, versus
from bench.contenders import Contender
from bench.contest import Step, durations
from bench.crew import unavailable
from bench.results import Distance, Sample, Settings, read
from harness import oracle
from reducer.planning import network_model
from tests.commands import run_command
from torture.soak import trends

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


def run(module, *arguments):
    return run_command(sys.executable, "-m", module, *arguments, cwd=ROOT)


def bench(module, *arguments):
    done = run(module, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measured(folder, module, *arguments):
    """What a benchmark finds in one round, on links that are not shaped, beside `found.json`."""
    file = folder / "found.json"
    bench(module, "--unshaped", "--rounds", "1", *arguments, "--json", file)
    return read(file)


def test_a_series_takes_as_long_as_its_all_reduces():
    early = {"begun": 10.0, "ends": [12.0, 15.0, 16.0]}
    late = {"begun": 11.0, "ends": [13.0, 14.0, 16.5]}
    assert durations([early, late]) == durations([late, early]) == [3.0, 2.0, 1.5]


def test_all_reduces_are_compared_and_reported(tmp_path):
    given = ["--workers", "2", "--reducers", "1", "--sizes", "4KiB,1MiB", "--iterations", "20"]
    picture = tmp_path / "found.png"
    found = measured(
        tmp_path, "bench.allreduce", *given, "--baselines", "gloo,ring", "--plot", picture
    )
    assert found.settings.mbit is None
    assert found.settings.payload_rates == []
    assert found.settings.skipped == {}
    assert {(row.contender, row.nbytes) for row in found.rows} == {
        (name, nbytes) for name in ("pool-1", "gloo", "ring") for nbytes in (4 << 10, 1 << 20)
    }
    for row in found.rows:
        assert row.wrong == 0
        assert row.checked == 2 * row.count == row.nbytes // 2
        assert row.exact == row.ours
        assert row.algbw == pytest.approx(row.nbytes / row.time_us * 1e6)
        assert row.busbw == pytest.approx(row.algbw)
        assert row.payload_share is None
        assert row.card_ratios == {}
        assert set(row.ratios) == ({"gloo", "ring"} if row.ours else set())
        assert (row.reducer_cpu_s_per_gb is not None) == row.ours
    assert picture.read_bytes().startswith(b"\x89PNG")

    file, page = tmp_path / "found.json", tmp_path / "report.html"
    report.main([file], page)
    assert "pool-1" in page.read_text()
    assert "no network card limits them" in page.read_text()
    report.main([file], tmp_path / "report.md")
    assert (tmp_path / "report-pictures" / "1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended("test_all_reduces_are_compared")
@pytest.mark.parametrize(
    ("given", "sizes", "cards"),
    [
        (
            ("--reducers", "1", "--wire", "bf16,fp16,int8"),
            ("4KiB", "64KiB", "8MiB"),
            {"pool-1": 3, "pool-1-bf16": 3, "pool-1-fp16": 3, "pool-1-int8": 3},
        ),
        (("--reducers", "1", "--keys"), ("64KiB",), {"pool-1": 3, "pool-1-keys": 3}),
        (("--embedded", "--mixed", "1"), ("64KiB",), {"embedded": 2, "mixed-1": 3}),
    ],
    ids=["fewer bits", "keys", "embedded"],
)
def test_other_contenders(given, sizes, cards, tmp_path):
    many = ("--workers", "2", "--sizes", ",".join(sizes), "--baselines", "")
    rows = measured(tmp_path, "bench.allreduce", *given, *many).rows
    found = {row.contender: row.cards for row in rows}
    assert list(found.items()) == list(cards.items())
    assert len(rows) == len(sizes) * len(cards)
    assert all(row.wrong == 0 and row.exact for row in rows)
    assert all((row.reducer_cpu_s_per_gb is None) == (row.contender == "embedded") for row in rows)


@pytest.mark.extended("test_all_reduces_are_compared")
def test_scaling(tmp_path):
    given = ["--workers", "2,3", "--reducers", "1,3", "--size", "64KiB", "--no-embedded"]
    picture = tmp_path / "found.png"
    rows = measured(tmp_path, "bench.scaling", *given, "--iterations", "3", "--plot", picture).rows
    assert [(row.workers, row.reducers, row.iterations, row.wrong) for row in rows] == [
        (2, 1, 3, 0),
        (3, 1, 3, 0),
        (3, 3, 3, 0),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended("test_all_reduces_are_compared")
def test_soak(tmp_path):
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    given = ["--count", "300", "--samples", "10", "--check-every", "20"]
    said = bench("torture.soak", *given, "--json", file, "--plot", picture)
    soak = read(file).soak
    assert soak
    assert (soak.all_reduces, soak.wrong) == (300, 0)
    assert soak.checked > 0
    names = ["worker 0", "worker 1", "reducer 0", "reducer 1"]
    assert [trend.process for trend in soak.trends] == names
    assert len(soak.samples) == 11 * len(names)
    assert all(sample.rss > 0 and sample.files > 0 for sample in soak.samples)
    assert "over the second half at most" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    report.main([file], tmp_path / "report.html")


@pytest.mark.extended("test_all_reduces_are_compared")
def test_a_contender_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("REDUCTION_CHUNK_BYTES", "7")
    file = tmp_path / "found.json"
    given = ["--unshaped", "--workers", "2", "--reducers", "1", "--baselines", "ring"]
    done = run("bench.allreduce", *given, "--sizes", "4KiB", "--rounds", "1", "--json", file)
    assert done.returncode == 1
    assert "# pool-1 was not measured: rank 0: ConfigError: REDUCTION_CHUNK_BYTES" in done.stdout
    found = read(file)
    assert [row.contender for row in found.rows] == ["ring"]
    assert found.rows[0].wrong == 0
    assert set(found.settings.skipped) == {"pool-1"}
    assert found.environment == {"REDUCTION_CHUNK_BYTES": "7"}


def test_without_root_links_are_not_shaped(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = options.begin_all_reduces("allreduce", 400.0, [2], 1)
    assert found.settings.mbit is None
    assert "shaped links need root" in capsys.readouterr().out


def test_results_say_how_far_the_hosts_were_apart():
    distance = Distance(round_trip_ms=200, loss_percent=1, congestion="bbr")
    settings = Settings(
        mbit=100,
        payload_rates=[10e6],
        streams=4,
        distance=distance,
        workers=[2],
        rounds=1,
        skipped={},
    )
    assert report.conditions(settings) == (
        "links of 100 Mbit/s each way, round trips of 200 ms, 1 % of packets lost, TCP bbr, "
        "10.00 MB/s of payload by iperf3 with 4 streams"
    )
    near = settings.model_copy(update={"distance": Distance(), "streams": 1})
    assert report.conditions(near) == (
        "links of 100 Mbit/s each way, 10.00 MB/s of payload by iperf3"
    )


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "install Open MPI" in unavailable(Contender("mpi"))
    assert not unavailable(Contender("ring"))


@pytest.mark.parametrize("exact", [True, False])
def test_every_wrong_element_counts(exact):
    count = oracle.PERIOD + 100
    total = oracle.contribution(0, count)
    for rank in (1, 2):
        total += oracle.contribution(rank, count)
    assert oracle.wrong(total, 3, exact=exact) == 0
    rounded = oracle.wrong(total, 3, exact=exact, wire_dtype="bf16")
    assert rounded == (0 if not exact else pytest.approx(total.size, rel=0.1))
    total[[5, -1]] += 1
    total[7] = np.nan
    assert oracle.wrong(total, 3, exact=exact) == 3


def test_one_bit_is_wrong_for_us_and_rounding_for_others():
    order = oracle.contribution(2, 1000)
    for rank in (1, 0):
        order += oracle.contribution(rank, 1000)
    assert oracle.wrong(order, 3, exact=True) > 0
    assert oracle.wrong(order, 3, exact=False) == 0


def test_limits_are_those_of_the_formulas():
    ring, embedded = Contender("ring"), Contender("embedded")
    assert theory.limit(ring, 4, 100.0) == pytest.approx(100 / 1.5)
    assert theory.limit(embedded, 2, 100.0) == 100
    assert theory.limit(Contender("pool", 8), 8, 100.0) == 100
    assert theory.limit(Contender("pool", 2), 8, 100.0) == 25
    assert theory.limit(Contender("pool", 8, "bf16"), 8, 100.0) == 200
    assert theory.limit(Contender("pool", 8, "int8"), 8, 64.0) == 252
    assert theory.limit(Contender("mixed", 8), 8, 100.0) == 100
    between = theory.limit(Contender("mixed", 4), 8, 100.0)
    assert theory.limit(ring, 8, 100.0) < between < 100


def test_growth_is_told_from_a_plateau():
    def process(name, rss):
        return [
            Sample(process=name, done=1000 * i, seconds=i, rss=size, files=9, threads=4)
            for i, size in enumerate(rss)
        ]

    plateau = process("plateau", [50 << 20] * 5 + [90 << 20] * 20)
    leak = process("leak", [(50 << 20) + i * (1 << 20) for i in range(25)])
    first, second = trends(plateau + leak)
    assert first.flat
    assert not second.flat
    assert second.bytes_per_1000 == pytest.approx(1 << 20)


@pytest.mark.parametrize(
    ("contender", "k", "least"),
    [("pool-2", 2, 1.001), ("mixed-2", 2, 1.001), ("embedded", 0, 1.0)],
)
def test_predictions_know_the_topology_and_the_shaper(contender, k, least):
    row = SimpleNamespace(workers=4, reducers=k, contender=contender, nbytes=64 << 20)
    predicted = plan.predict(row, 100.0)
    rate = 100e6 / 8 * network_model.payload_share()
    kind, _, _ = contender.partition("-")
    limit = theory.limit(Contender(kind, k), 4, rate)
    # On top of what the links allow there are headers and, but for embedded jobs, a few chunks.
    assert least < predicted / (row.nbytes / limit) < 1.02
    times = network_model.card_times(
        row.nbytes, 4, k, kind, network_model.Network(rate, rate, 0.0002)
    )
    assert predicted == pytest.approx(sum(times) - min((256 << 10) / rate, times.idle_s))


@pytest.mark.extended("test_all_reduces_are_compared")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts with links of their own")
@pytest.mark.skipif(not shutil.which("iperf3"), reason="needs iperf3: make test-tools")
def test_predictions_are_compared_with_the_lab():
    said = bench(
        "bench.plan",
        *("--workers", "2", "--reducers", "1,2", "--no-embedded", "--size", "1MiB"),
        *("--rounds", "1", "--within", "1000"),
    )
    rows = [line.split() for line in said.splitlines() if line.split()[0] == "2"]
    assert [row[:4] for row in rows] == [
        ["2", "1", "pool", "1048576"],
        ["2", "2", "pool", "1048576"],
        ["2", "1", "mixed", "1048576"],
    ]


@pytest.mark.extended("test_all_reduces_are_compared")
def test_checkouts_side_by_side():
    given = ["--unshaped", "--workers", "2", "--reducers", "1", "--sizes", "4KiB"]
    lines = bench(
        "bench.versus", f"one={ROOT}", f"other={ROOT}", *given, "--rounds", "3"
    ).splitlines()
    one, other = (line.split() for line in lines if line.startswith("4KiB"))
    assert one[1] == "one:"
    assert one[4:10] == ["1.000", "of", "one", "(1.000", "to", "1.000),"]
    assert other[1] == "other:"
    assert 0.1 < float(other[4]) < 10


@pytest.mark.extended("test_all_reduces_are_compared")
@pytest.mark.parametrize("reducers", [0, 2])
def test_auto_is_compared_with_what_could_be_set(reducers):
    sizes = "4KiB", "64B+8KiB&2x64KiB"
    given = "--unshaped", "--workers", "2", "--reducers", str(reducers), "--sizes", ",".join(sizes)
    few = "--chunks", "64KiB,128KiB", "--windows", "1MiB", "--iterations", "3", "--rounds", "3"
    done = run("bench.tune_check", *given, *few, "--least", "100")
    lines = [line for line in done.stdout.splitlines() if "auto" in line]
    kind = "pool-2" if reducers else "embedded"
    for line, size in zip(lines, sizes, strict=True):
        assert re.fullmatch(
            rf"{re.escape(size)}: auto takes [0-9.]+ us, [0-9.]+ of the speed of "
            rf"{kind}-(64|128)KiB-1MiB \([0-9.]+ to [0-9.]+\)",
            line,
        )
    assert done.returncode != 0
    assert f"auto is below 100 of the best at {', '.join(sizes)}" in done.stderr


def test_a_step_is_of_calls_in_turn_and_of_calls_that_are_begun_together():
    alone, step = options.steps("4KiB, 64B+1KiB&2x4KiB")
    assert alone == 4096
    assert isinstance(step, Step)
    assert step.groups == ((64,), (1024, 4096, 4096))
    assert step.nbytes == 9280
    with pytest.raises(typer.BadParameter, match="sizes are multiples"):
        options.steps("4KiB+")


@pytest.mark.parametrize("text", ["here", "=.", "lost=/nowhere"])
def test_what_is_no_checkout(text):
    with pytest.raises(typer.BadParameter, match="write NAME=DIR with"):
        versus.checkout(text, 1)


def test_ratios_of_rounds_have_bounds():
    first = [1.0, 2.0, 4.0, 1.0, 2.0]
    assert versus.ratio(first, [2 * time for time in first]) == (2, 2, 2)
    low, middle, high = versus.ratio(first, [1.0, 2.0, 8.0, 1.1, 2.2])
    assert (low, middle, high) == pytest.approx((1.0, 1.1, 2.0))
