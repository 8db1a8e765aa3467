"""`.ci/run`: which tests a change demands, and what it prints last."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMANDS = ROOT / ".ci" / "demands.py"
MODULE = runpy.run_path(str(DEMANDS))


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
        ("worker_client/protocol/session.py", ["tests/engine tests/sim tests/worker_client'"]),
        ("worker_client/fsdp.py", ["tests/worker_client'", "test-frameworks", "docs"]),
        ("bench/README.md", ["tests/bench'", "docs"]),
        ("docs/tutorial.md", ["test_pages.py tests/lab/test_tutorial.py'", "docs"]),
        ("tests/frameworks/torch_suite.py", ["test-frameworks", "test-torch-suite"]),
        ("docker/reducer.Dockerfile", ["test-containers"]),
        ("docker/vertex/custom-job.yaml", ["test_vertex.py'", "test-containers", "test-clouds"]),
        ("docker/grafana/reducers.json", ["test_prometheus.py'", "test-containers"]),
        ("worker_client/protocol/failover.py", ["test_failures.py tests/sim tests/worker_client'"]),
        (
            "bench/rank_loss.py",
            ["test_elastic.py tests/integration/test_rank_loss.py tests/lab'"],
        ),
        ("fuzz/targets.py", []),
        ("tests/security/test_pool.py", ["test-extended SELECT='-m extended tests/security'"]),
        ("tests/wire/test_header.py", []),
        ("tests/of_yore/test_what.py", []),
        (
            "Makefile",
            [
                *("test-extended SELECT='-m extended'", "test-containers", "test-clouds"),
                *("test-frameworks", "test-torch-suite", "docs", "wheels"),
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


def test_what_failed_and_the_closing_lines_are_printed_last(tmp_path: Path) -> None:
    """Of `make`, which is a stand-in here, the first pytest run fails and the second does not."""
    (tmp_path / "make").write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "lint) echo linted ;;\n"
        'test) echo "FAILED tests/test_a.py::test_b - AssertionError"\n'
        '  echo "===== 1 failed, 2 passed in 3.00s ====="; echo "make: Error 1"; exit 2 ;;\n'
        '*) echo "===== 4 passed, 5 deselected in 6.00s (0:01:00) =====" ;;\n'
        "esac\n"
    )
    (tmp_path / "make").chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run"), "--full"],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    targets = len(MODULE["EVERYTHING"])
    assert (
        done.stdout.splitlines()[-4 - targets :]
        == [
            *("", "FAILED tests/test_a.py::test_b - AssertionError", "failed: make test"),
            *["===== 4 passed, 5 deselected in 6.00s (0:01:00) ====="] * (1 + targets),
            "===== 1 failed, 2 passed in 3.00s =====",
        ][-4 - targets :]
    )


ONCE = """
from pathlib import Path
import pytest

def test_it():
    runs = Path("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    %s
"""
RAN = "make: *** [Makefile:55: test] Error 1\n"


@pytest.mark.parametrize(
    ("files", "body", "log", "status_and_runs"),
    [
        (1, "assert runs.read_text() != 'x'", RAN, (0, 4)),  # it fails beside others alone
        (1, "assert runs.read_text() not in ('x', 'xxx')", RAN, (1, 3)),
        (1, "assert False", RAN, (1, 2)),
        (1, "assert runs.read_text() != 'x'", "make: *** [Makefile:55: test] Error 2\n", (1, 1)),
        (1, "pytest.skip('not now') if runs.read_text() != 'x' else 1 / 0", RAN, (1, 2)),
        (2, "assert len(runs.read_text()) > 2", RAN, (0, 8)),
        (4, "assert len(runs.read_text()) > 4", RAN, (1, 4)),  # too many for what is beside them
    ],
)
def test_a_test_that_fails_has_a_second_look(
    tmp_path: Path, files: int, body: str, log: str, status_and_runs: tuple[int, int]
) -> None:
    """With pytest itself, and what it leaves behind."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "second_look.py"
    script.write_text((ROOT / ".ci" / "second_look.py").read_text())
    for at in range(files):
        (tmp_path / f"test_once_{at}.py").write_text(ONCE % body)
    (tmp_path / "log").write_text(log)
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}

    def run(*command: str) -> int:
        words = [sys.executable, *command]
        return subprocess.run(words, cwd=tmp_path, env=environment, check=False).returncode

    assert run("-m", "pytest", "-q") == 1
    status = run(str(script), "log")
    assert (status, len((tmp_path / "runs").read_text())) == status_and_runs


def test_changes_add_up() -> None:
    assert demanded("lab/lab.py", "examples/fsdp.py", "lab/network.py") == [
        "test-extended SELECT='-m extended tests/lab tests/launch/test_vertex.py'",
        "test-frameworks",
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_every_row_is_of_something() -> None:
    found = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = found.stdout.splitlines()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for patterns, demands in MODULE["DEMANDS"]:
        for pattern in patterns.split():
            assert any(fnmatch(file, pattern) for file in files), pattern
        for demand in demands:
            assert demand in targets or MODULE["files_of"](demand), demand
