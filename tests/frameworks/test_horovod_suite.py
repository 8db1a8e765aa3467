"""Horovod's own tests pass, or it is said why not."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.frameworks.horovod_suite import CLASSES, FOLDER, SOURCE, table
from tests.horovod_imports import PAGE

SUITE = ("-m", "tests.frameworks.horovod_suite")
ROOT = Path(__file__).parents[2]
# How many tests of each file must pass at least.
LEAST = {
    "test_torch.py": 95,
    "test_tensorflow.py": 79,
    "test_tensorflow_process_sets.py": 21,
    "test_tensorflow2_keras.py": 2,
}


@pytest.mark.parametrize("file", CLASSES)
def test_the_page_says_which_fail(file):
    assert table(file) in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", CLASSES)
@pytest.mark.parametrize("size", [2, 3])
def test_horovods_tests_pass(file, size, tmp_path):
    for package in ("torch", "tensorflow") if "tensorflow" in file else ("torch",):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    if not Path(os.environ.get(SOURCE, ""), FOLDER, file).is_file():
        pytest.skip(f"{SOURCE} names no checkout of Horovod")
    out = tmp_path / "ends.json"
    done = run_command(sys.executable, *SUITE, file, "--world-size", size, "--json", out, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "hangs" not in done.stdout
    ends = json.loads(out.read_text())
    assert sum(end[0] == "passed" for end in ends.values()) >= LEAST[file]
