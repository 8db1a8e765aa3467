"""What of PyTorch's own distributed tests passes over Gloo passes over the backend, too."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

pytest.importorskip("torch", reason="needs torch")

SUITE = ("-m", "tests.frameworks.torch_suite")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 4])
def test_all_that_passes_over_gloo_passes(size, tmp_path):
    out = tmp_path / "ends.json"
    done = run_command(sys.executable, *SUITE, "--world-size", size, "--json", out, cwd=ROOT)
    assert out.exists(), done.stderr
    gloo, ours = json.loads(out.read_text()).values()
    passed = [name for name, end in gloo.items() if end[0] == "passed"]
    assert len(passed) >= 80
    assert list(ours) == passed
    assert {name: end for name, end in ours.items() if end[0] != "passed"} == {}
    reduced = {name for name, end in ours.items() if end[2] > 0}
    assert len(reduced) >= 20
    assert {"test_all_reduce_sum", "test_all_reduce_full_group_max"} <= reduced
