"""`.ci/run`: which tests a change demands, and what it prints last."""

import datetime
import os
import re
import runpy
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parent.parent
DEMANDS = ROOT / ".ci" / "demands.py"
MODULE = runpy.run_path(str(DEMANDS))


def demanded(*paths):
    done = run_command(sys.executable, DEMANDS, input="\n".join(paths))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FUZZED = ["sanitize SANITIZE=--short", "fuzz FUZZ_SECONDS=5"]


@pytest.mark.parametrize(
    ("path", "lines", "left_out"),
    [
        ("README.md", [], []),
        (
            "worker_client/protocol/session.py",
            ["test-extended SELECT='-m extended tests/torture/test_guarantee.py"],
            ["test-extended SELECT='-m extended tests/engine tests/sim tests/worker_client'"],
        ),
        ("worker_client/staging/_cast.pyx", [*FUZZED], ["test-extended", "wheels", "sanitize"]),
        ("docs/tutorial.md", ["docs"], ["test-extended"]),
        ("docker/vertex/custom-job.yaml", ["test-containers"], ["test-extended", "test-clouds"]),
        ("tests/frameworks/torch_suite.py", ["test-frameworks"], ["test-torch-suite"]),
        ("tests/of_yore/test_what.py", [], []),
        (
            "Makefile",
            ["test-frameworks", "test-containers", "docs", "wheels", *FUZZED],
            [f"{target} " for target in MODULE["EVERYTHING"] if target != "docs"],
        ),
    ],
)
def test_what_a_change_demands(path, lines, left_out):
    found = demanded(path)
    made = [line for line in found if not line.startswith("left out: ")]
    said = [line for line in found if line.startswith("left out: ")]
    assert all(any(line.startswith(one) for line in made) for one in lines), made
    assert all(any(line.startswith(f"left out: make {one}") for line in said) for one in left_out)
    assert (bool(made), bool(said)) == (bool(lines), bool(left_out))


def test_everything_fits_into_the_budget():
    rows = MODULE["REPRESENTATIVES"].values()
    assert MODULE["BASE_S"] + sum(row.seconds for row in rows) <= MODULE["BUDGET_S"] == 25 * 60
    assert all(bool(row.line) == bool(row.seconds) for row in rows)


@pytest.mark.parametrize("arguments", [["--since", "no-such-commit"], ["--all"]])
def test_what_it_cannot_understand_runs_nothing(arguments):
    done = run_command("bash", ROOT / ".ci" / "run", *arguments, timeout=60)
    assert done.returncode == 2
    assert done.stderr
    assert "make" not in done.stdout


def with_make(folder, script):
    """The environment in which a stand-in for `make`, in a folder, is found first."""
    (folder / "make").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "make").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


FIRST_FAILS = """
case "$1" in
lint) echo linted ;;
test) echo "FAILED tests/test_a.py::test_b - AssertionError"
  echo "===== 1 failed, 2 passed in 3.00s ====="; echo "make: Error 1"; exit 2 ;;
*) echo "===== 4 passed, 5 deselected in 6.00s (0:01:00) =====" ;;
esac
"""


def test_what_failed_and_the_closing_lines_are_printed_last(tmp_path):
    environment = with_make(tmp_path, FIRST_FAILS)
    done = run_command("bash", ROOT / ".ci" / "run", "--full", env=environment, timeout=60)
    assert done.returncode == 1
    last = ["", "FAILED tests/test_a.py::test_b - AssertionError", "failed: make test"]
    well = "===== 4 passed, 5 deselected in 6.00s (0:01:00) ====="
    last += [well] * (1 + len(MODULE["EVERYTHING"])) + ["===== 1 failed, 2 passed in 3.00s ====="]
    assert done.stdout.splitlines()[1 - len(last) :] == last[1:]


ONCE = """
import os, signal, time
from pathlib import Path
import pytest
from tests.waits import eventually

def test_it():
    runs = Path("runs")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    first = runs.read_text() == "x"
    %s
"""
RAN = "make: *** [Makefile:55: test] Error 1\n"
LATE = "eventually(lambda: not first, 0.01)"


def look_again(folder, body, name="tests/test_once.py", files=1, log=RAN):
    """Fail with pytest itself, look again; return the status, the runs in all, and the list."""
    (folder / ".ci").mkdir()
    (folder / ".ci" / "second_look.py").write_text((ROOT / ".ci" / "second_look.py").read_text())
    for at in range(files):
        path = folder / name.replace("once", f"once_{at}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ONCE % body)
    (folder / "log").write_text(log)
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*command):
        return run_command(sys.executable, *command, cwd=folder, env=environment).returncode

    options = ("-q", "-n", "1", "-p", "tests.verdicts", "-o", "timeout=3", "--rootdir=.")
    assert run("-m", "pytest", *options, "--import-mode=importlib", "tests") == 1
    status = run(".ci/second_look.py", "log")
    kept = folder / ".ci" / "unsteady.txt"
    return status, len((folder / "runs").read_text()), kept.read_text() if kept.exists() else ""


# What the test does that is not looked at again, and what else is so.
AT_ONCE = {
    "wrong": ("assert not first, 'a wrong bit'", {}),
    "crash": ("if first: os.kill(os.getpid(), signal.SIGSEGV)", {}),
    "hang": ("if first: time.sleep(60)", {}),  # until pytest-timeout ends it
    "late and wrong": (
        f"{LATE}\n\n@pytest.fixture(autouse=True)\ndef wrong():\n    yield\n    assert False",
        {},
    ),
    "guarantee": (LATE, {"name": "tests/sim/test_once.py"}),
    "stopped": (LATE, {"log": RAN.replace("Error 1", "Error 2")}),
    "many": ("eventually(lambda: len(runs.read_text()) > 4, 0.01)", {"files": 4}),
    "skipped": ("if first: eventually(lambda: False, 0.01)\n    pytest.skip('not now')", {}),
    "late again": ("eventually(lambda: runs.read_text() == 'xx', 0.01)", {}),
}


@pytest.mark.extended_cases(*(case for case in AT_ONCE if case != "wrong"))
@pytest.mark.parametrize("case", AT_ONCE)
def test_what_fails_at_once(case, tmp_path):
    body, others = AT_ONCE[case]
    status, runs, kept = look_again(tmp_path, body, **others)
    assert status == 1
    assert not kept
    looked_again = case in {"skipped", "late again"}
    assert runs <= 3 if looked_again else runs == others.get("files", 1)


def test_a_limit_of_time_has_a_second_look_and_a_place_in_the_list(tmp_path):
    status, runs, kept = look_again(tmp_path, LATE)
    assert (status, runs) == (0, 4)
    (line,) = kept.splitlines()
    assert line.endswith(" tests/test_once_0.py::test_it")


@pytest.mark.parametrize(("days", "status"), [((1, 29), 1), ((1, 31), 0), ((), 0)])
def test_the_third_time_in_30_days_is_a_failure(days, status, tmp_path):
    note = runpy.run_path(str(ROOT / ".ci" / "second_look.py"))["note"]
    list_ = note.__globals__["LIST"] = tmp_path / "unsteady.txt"
    today = datetime.date(2026, 11, 29)
    before = (f"{today - datetime.timedelta(days=ago)} test_a\n" for ago in days)
    list_.write_text("# a comment\n" + "".join(before))
    assert note(["test_a", "test_b"], today) == ["test_a"] * status
    assert list_.read_text().endswith(f"{today} test_a\n{today} test_b\n")


@pytest.mark.parametrize("required", ["", "1"])
def test_a_skip_for_want_of_a_tool_is_a_failure_where_tools_are_installed(required, tmp_path):
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "def test_a(): pytest.skip('needs `iperf3`: make test-tools')\n"
        "def test_b(): pytest.skip('this CPU cannot')\n"
    )
    command = (sys.executable, "-m", "pytest", "-p", "tests.verdicts", "-q", tmp_path)
    environment = {**os.environ, "REQUIRE_TOOLS": required, "PYTHONPATH": str(ROOT)}
    done = run_command(*command, cwd=tmp_path, env=environment)
    assert done.returncode == bool(required)
    assert ("1 failed, 1 skipped" if required else "2 skipped") in done.stdout


def test_a_change_is_what_came_since_the_commit_that_passed_in_full(tmp_path):
    """In a repository of its own."""
    (tmp_path / "bin").mkdir()
    environment = with_make(tmp_path / "bin", "echo '=== 1 passed in 0.01s ==='")
    environment |= dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "a")
    environment |= dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "a@example.org")

    def succeed(*command):
        done = run_command(*command, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit():
        succeed("git", "-C", tmp_path, "add", "-A")
        succeed("git", "-C", tmp_path, "commit", "-qm", "one")

    def run(*arguments):
        return succeed("bash", tmp_path / ".ci" / "run", *arguments)

    (tmp_path / ".ci").mkdir()
    for name in ("run", "demands.py", "second_look.py"):
        (tmp_path / ".ci" / name).write_text((ROOT / ".ci" / name).read_text())
    (tmp_path / ".ci" / "passed").write_text("# none\n")
    (tmp_path / ".gitignore").write_text("bin\n")
    succeed("git", "init", "-q", tmp_path)
    commit()
    assert "\nmake wheels" in run()  # nothing has passed: all is new
    assert "commit .ci/passed" in run("--full")
    commit()
    (tmp_path / "README.md").write_text("more\n")
    commit()
    (tmp_path / "SECURITY.md").write_text("not committed\n")
    said = run()
    assert "\nmake docs\n" in said
    assert "make wheels" not in said  # .ci/passed itself demands nothing


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_every_row_is_of_something():
    files = run_command("git", "ls-files", cwd=ROOT).stdout.splitlines()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for patterns, demands in MODULE["DEMANDS"]:
        for pattern in patterns.split():
            assert any(fnmatch(file, pattern) for file in files), pattern
        for demand in demands:
            assert demand in targets or MODULE["files_of"](demand), demand
