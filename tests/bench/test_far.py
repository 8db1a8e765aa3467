"""`bench.far`, shortly and not so far."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.extended("tests/bench/test_allreduce.py::test_results_say_how_far")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces")
@pytest.mark.skipif(
    not (shutil.which("iperf3") and shutil.which("cc")),
    reason="needs iperf3 and a C compiler: make test-tools",
)
def test_all_reduces_in_flight_beside_iperf3():
    near = ["--round-trip-ms", "60", "--loss-percent", "0", "--congestion", "cubic"]
    short = ["--count", "4", "--size", "64KiB", "--in-flight", "3", "--iperf-s", "1"]
    done = run_command(sys.executable, "-m", "bench.far", *near, *short, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    conditions, _, figures = done.stdout.splitlines()
    assert "60 ms, 0 % lost, TCP cubic; 2 ranks, 2 reducers, 3 streams to each" in conditions
    row = re.fullmatch(r" *([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +0 +0", figures)
    assert row is not None, figures
    # Four all-reduces of which three begin at once take two round trips at the least.
    assert float(row[4]) >= 0.12 - 0.005
    assert 0 < float(row[1]) < 12.5
