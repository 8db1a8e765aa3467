"""PyTorch's own distributed tests, and Horovod's: all pass, or it is said why not."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.frameworks.horovod_suite import FOLDER, SOURCE
from tests.ranks import ROOT

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# How many tests of each file of Horovod's must pass at least.
LEAST = {
    "test_torch.py": 95,
    "test_tensorflow.py": 79,
    "test_tensorflow_process_sets.py": 21,
    "test_tensorflow2_keras.py": 2,
}


def run(tmp_path, suite, *arguments):
    """Return how a suite's command ended, and what became of each test."""
    out = tmp_path / "ends.json"
    command = ("-m", f"tests.frameworks.{suite}", *arguments, "--json", out)
    done = run_command(sys.executable, *command, cwd=ROOT)
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())


@pytest.mark.parametrize("size", [2, 4])
def test_all_that_passes_over_gloo_passes(size, tmp_path):
    _, ends = run(tmp_path, "torch_suite", "--world-size", size)
    gloo, ours = ends.values()
    passed = [name for name, end in gloo.items() if end[0] == "passed"]
    assert len(passed) >= 80
    assert list(ours) == passed
    assert {name: end for name, end in ours.items() if end[0] != "passed"} == {}
    reduced = {name for name, end in ours.items() if end[2] > 0}
    assert len(reduced) >= 20
    assert {"test_all_reduce_sum", "test_all_reduce_full_group_max"} <= reduced


@pytest.mark.parametrize("file", LEAST)
@pytest.mark.parametrize("size", [2, 3])
def test_horovods_tests_pass(file, size, tmp_path):
    if "tensorflow" in file and find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    if not Path(os.environ.get(SOURCE, ""), FOLDER, file).is_file():
        pytest.skip(f"{SOURCE} names no checkout of Horovod")
    done, ends = run(tmp_path, "horovod_suite", file, "--world-size", size)
    assert done.returncode == 0, done.stdout
    assert "hangs" not in done.stdout
    assert sum(end[0] == "passed" for end in ends.values()) >= LEAST[file]
