"""Horovod's own tests pass, or it is said why not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.frameworks.horovod_suite import FILE, SOURCE, table

SUITE = Path(__file__).with_name("horovod_suite.py")
ROOT = Path(__file__).parents[2]
LEAST = 95  # tests that pass, of the 105 that need no GPU


def test_the_page_says_which_fail() -> None:
    assert table() in (ROOT / "docs/horovod.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3])
def test_horovods_tests_pass(size: int, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    if not Path(os.environ.get(SOURCE, ""), FILE).is_file():
        pytest.skip(f"{SOURCE} names no checkout of Horovod")
    out = tmp_path / "ends.json"
    done = run_command(sys.executable, SUITE, "--world-size", size, "--json", out, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "hangs" not in done.stdout
    ends = json.loads(out.read_text())
    assert sum(end[0] == "passed" for end in ends.values()) >= LEAST
