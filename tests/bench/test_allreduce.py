"""Whole runs of the benchmarks with real processes, short ones; and their arithmetic."""

import os
import re
import shlex
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
from bench.results import Sample, read
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
    assert (found.settings.mbit, found.settings.skipped) == (None, {})
    assert {(row.contender, row.nbytes) for row in found.rows} == {
        (name, nbytes) for name in ("pool-1", "gloo", "ring") for nbytes in (4 << 10, 1 << 20)
    }
    for row in found.rows:
        assert row.wrong == 0
        assert row.checked == 2 * row.count == row.nbytes // 2
        assert row.exact == row.ours
        assert row.algbw == pytest.approx(row.nbytes / row.time_us * 1e6)
        assert row.busbw == pytest.approx(row.algbw)
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


SHAPED = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("iperf3"),
    reason="needs root, for hosts with links of their own, and iperf3: make test-tools",
)
TWO = "--unshaped --workers 2 --rounds 3 --sizes 4KiB"
SCALED = "--reducers 1,3 --size 64KiB --no-embedded --iterations 3 --rounds 1 --plot PICTURE"
PREDICTED = "--reducers 1,2 --size 1MiB --no-embedded --rounds 1 --within 1000"
TUNED = ",64B+8KiB&2x64KiB --chunks 64KiB,128KiB --windows 1MiB --iterations 3 --least 0"
NEAR = "--round-trip-ms 60 --loss-percent 0 --congestion cubic"
# Lines of commands, and what they print.
SHORT = [
    ("pytest bench/micro --benchmark-disable -p no:cacheprovider -k 'not MiB'", r"\d\d passed"),
    (
        f"bench.scaling --unshaped --workers 2,3 {SCALED}",
        r"pool-1 +2 +1 .*\n +pool-1 +3 +1 .*\n +pool-3 +3 +3 ",
    ),
    (
        "torture.soak --count 300 --samples 10 --check-every 20 --plot PICTURE",
        r"300 all-reduces, .*; 0 wrong of [1-9](?s:.*)over the second half at most",
    ),
    pytest.param(
        f"bench.plan --workers 2 {PREDICTED}",
        r" 2 +1 +pool +1048576 .*\n +2 +2 +pool +1048576 .*\n +2 +1 +mixed +1048576 ",
        marks=SHAPED,
    ),
    (
        f"bench.versus one={ROOT} other={ROOT} {TWO} --reducers 1",
        r"4KiB one: .* 1\.000 of one \(1\.000 to 1\.000\),.*\n4KiB other: .* of one \(",
    ),
    (
        f"bench.tune_check {TWO}{TUNED} --reducers 0",
        r"4KiB: auto takes .* of embedded-(64|128)KiB-1MiB \(.*\n64B\+8KiB&2x64KiB: auto ",
    ),
    pytest.param(
        f"bench.far {NEAR} --count 4 --size 64KiB --in-flight 3 --iperf-s 1",
        # Four all-reduces of which three begin at once take two round trips.
        r" 60 ms, 0 % lost, TCP cubic; 2 ranks, 2 reducers, 3 streams to each, .*\n.*\n"
        r" *\S+ +\S+ +\S+ +(0\.[1-9]|[1-9]\S*) +0 +0\n",
        marks=[SHAPED, pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")],
    ),
    (f"bench.tune_check {TWO}{TUNED} --reducers 2", r"4KiB: .* of pool-2-(64|128)KiB-1MiB \("),
]


@pytest.mark.extended("test_all_reduces_are_compared")
@pytest.mark.parametrize(("line", "says"), SHORT)
def test_a_command_measures_and_finds_nothing_wrong(line, says, tmp_path):
    picture = tmp_path / "found.png"
    said = bench(*shlex.split(line.replace("PICTURE", str(picture))))
    assert re.search(says, said), said
    assert "--plot" not in line or picture.read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize("exact", [True, False])
def test_every_wrong_element_counts(exact):
    count = oracle.PERIOD + 100
    total = oracle.contribution(0, count)
    for rank in (1, 2):
        total += oracle.contribution(rank, count)
    assert oracle.wrong(total, 3, exact=exact) == 0
    rounded = oracle.wrong(total, 3, exact=exact, wire_dtype="bf16")
    assert rounded == (0 if not exact else pytest.approx(total.size, rel=0.1))
    # One bit is wrong for us, and another order's rounding for others.
    other = oracle.contribution(2, count) + oracle.contribution(1, count)
    other += oracle.contribution(0, count)
    assert (oracle.wrong(other, 3, exact=exact) > 0) == exact
    total[[5, -1]] += 1
    total[7] = np.nan
    assert oracle.wrong(total, 3, exact=exact) == 3


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


def test_a_step_is_of_calls_in_turn_and_of_calls_that_are_begun_together():
    alone, step = options.steps("4KiB, 64B+1KiB&2x4KiB")
    assert alone == 4096
    assert isinstance(step, Step)
    assert step.groups == ((64,), (1024, 4096, 4096))
    assert step.nbytes == 9280
    with pytest.raises(typer.BadParameter, match="sizes are multiples"):
        options.steps("4KiB+")


def test_ratios_of_rounds_have_bounds():
    first = [1.0, 2.0, 4.0, 1.0, 2.0]
    assert versus.ratio(first, [2 * time for time in first]) == (2, 2, 2)
    low, middle, high = versus.ratio(first, [1.0, 2.0, 8.0, 1.1, 2.2])
    assert (low, middle, high) == pytest.approx((1.0, 1.1, 2.0))
