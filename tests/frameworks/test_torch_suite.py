"""What of PyTorch's own distributed tests passes over Gloo passes over the backend, too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

pytest.importorskip("torch", reason="needs torch")

SUITE = Path(__file__).with_name("torch_suite.py")
ROOT = Path(__file__).parents[2]


def run(backend: str, out: Path) -> dict[str, tuple[str, str, int]]:
    """Return the outcome of each test, why, and the bytes that rank 0 reduced."""
    done = run_command(sys.executable, SUITE, backend, "--json", out, cwd=ROOT)
    assert out.exists(), done.stderr
    assert done.stdout.count(" hung\n") <= 2, done.stdout
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_that_passes_over_gloo_passes(tmp_path: Path) -> None:
    gloo, ours = (run(backend, tmp_path / backend) for backend in ("gloo", "reduction"))
    passed = {name for name, end in gloo.items() if end[0] == "passed"}
    assert len(passed) >= 80
    assert {name: ours[name] for name in passed if ours[name][0] != "passed"} == {}
    reduced = [name for name, end in ours.items() if end[2] > 0]
    assert len(reduced) >= 20
    assert {"test_all_reduce_sum", "test_all_reduce_full_group_max"} <= set(reduced)
