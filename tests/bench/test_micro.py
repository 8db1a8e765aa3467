"""The micro-benchmarks, each run once and not timed."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "bench/micro"


@pytest.mark.extended("tests/bench/test_allreduce.py::test_all_reduces_are_compared")
def test_all_but_the_large_ones_find_the_right_results():
    assert find_spec("pytest_benchmark"), "pytest-benchmark is missing: install the extra `dev`"
    command = [sys.executable, "-m", "pytest", MICRO, "--benchmark-disable", "--tb=short"]
    command += ["-rfEp", "-k", "not MiB", "-p", "no:cacheprovider"]
    ran = run_command(*command, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = set(re.findall(r"^PASSED (\S+?)::", ran.stdout, re.MULTILINE))
    assert passed == {str(file.relative_to(ROOT)) for file in MICRO.glob("test_*.py")}
