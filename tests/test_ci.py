"""`.ci/run`: which tests a change demands, and what it prints last."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMANDS = ROOT / ".ci" / "demands.py"
TABLE = runpy.run_path(str(DEMANDS))["DEMANDS"]


def demanded(*paths: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(DEMANDS)],
        input="\n".join(paths),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("README.md", []),
        ("worker_client/session.py", ["tests/engine tests/sim tests/worker_client'"]),
        ("worker_client/fsdp.py", ["tests/worker_client'", "test-frameworks"]),
        ("tests/frameworks/torch_suite.py", ["test-frameworks", "test-torch-suite"]),
        ("docker/reducer.Dockerfile", ["test-containers"]),
        ("docker/vertex/custom-job.yaml", ["test-containers", "test-clouds"]),
        ("tests/security/test_pool.py", ["test-extended SELECT='-m extended tests/security'"]),
        (
            "Makefile",
            [
                *("test-extended SELECT='-m extended'", "test-containers", "test-clouds"),
                *("test-frameworks", "test-torch-suite"),
            ],
        ),
    ],
)
def test_what_a_change_demands(path: str, lines: list[str]) -> None:
    found = demanded(path)
    assert len(found) == len(lines)
    assert all(line.endswith(end) for line, end in zip(found, lines, strict=True)), found


@pytest.mark.parametrize("arguments", [["--since", "no-such-commit"], ["--all"]])
def test_what_it_cannot_understand_runs_nothing(arguments: list[str]) -> None:
    command = ["bash", str(ROOT / ".ci" / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr
    assert "make" not in done.stdout


def test_changes_add_up() -> None:
    assert demanded("lab/lab.py", "examples/fsdp.py", "lab/rate.py") == [
        "test-extended SELECT='-m extended tests/lab'",
        "test-frameworks",
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_every_row_is_of_something() -> None:
    found = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = found.stdout.splitlines()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for patterns, demands in TABLE:
        for pattern in patterns.split():
            assert any(fnmatch(file, pattern) for file in files), pattern
        for demand in demands:
            assert demand in targets or (ROOT / demand).exists(), demand
