"""Runs tests that exceeded a limit of time three times more, beside load, and keeps a list of them.

    make test | tee LOG; python3 .ci/second_look.py LOG

Beside others, on two cores, a limit of time may be exceeded because a test waited for a processor.
So if pytest ran to its end, and every failure is a `TooLateError` (tests/waits.py) of at most three
files, those of each file are run again, beside a process a core that only computes. They are
UNSTEADY if all those runs pass. A crash, a hang that pytest-timeout ended, a wrong value, any other
error, and whatever a test of the guarantee says are failures at once.

Each unsteady test is a line of `.ci/unsteady.txt`, which is to be committed; the third of one test
within 30 days is a failure. The exit status is 0 if nothing has failed.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "v"  # what pytest, and tests/conftest.py, leave behind
LIST = ROOT / ".ci" / "unsteady.txt"
MOST_FILES = 3
RUNS = 3
MOST_A_MONTH = 2
MONTH = datetime.timedelta(days=30)
# Make's word for pytest's exit status 1: all tests were run, and some failed.
RAN_TO_ITS_END = re.compile(r"^make: \*\*\* \[.*\] Error 1$", re.M)
# They search for a wrong or missing result, with limits that are part of the promise.
GUARANTEE = (
    *("tests/sim/", "tests/quorum/", "tests/memberships/", "tests/engine/", "tests/kernels/"),
    *("tests/integration/test_bits.py", "tests/integration/test_faults.py", "tests/faults/"),
    *("tests/torture/test_guarantee", "tests/transport/test_resume"),
)
BUSY = "while True: pass"


def late_alone(log: str) -> list[list[str]]:
    """Return the tests that deserve a second look, those of a file together."""
    failed, late = (_cached(name) for name in ("cache/lastfailed", "reduction/too-late"))
    if not RAN_TO_ITS_END.search(log) or not failed or not failed <= late:
        return []
    if any(test.startswith(GUARANTEE) for test in failed):
        return []
    files: dict[str, list[str]] = {}
    for test in sorted(failed):
        files.setdefault(test.partition("::")[0], []).append(test)
    return list(files.values()) if len(files) <= MOST_FILES else []


def _cached(name: str) -> set[str]:
    file = CACHE / name
    return set(json.loads(file.read_text())) if file.exists() else set()


@contextmanager
def load() -> Iterator[None]:
    """Keep every core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def passes(tests: list[str]) -> bool:
    """Return whether pytest runs these tests, and all pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfEs", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return done.returncode == 0 and " skipped" not in done.stdout.splitlines()[-1]


def note(tests: list[str], today: datetime.date) -> list[str]:
    """Add tests to the list; return those that were unsteady too often."""
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    recent = [
        test
        for date, _, test in (line.partition(" ") for line in lines if not line.startswith("#"))
        if today - datetime.date.fromisoformat(date) < MONTH
    ]
    LIST.write_text("\n".join([*lines, *(f"{today} {test}" for test in tests), ""]))
    return [test for test in tests if recent.count(test) >= MOST_A_MONTH]


def main() -> int:
    """Look again at what `sys.argv[1]` tells of; return the exit status."""
    files = late_alone(Path(sys.argv[1]).read_text(errors="replace"))
    if not files:
        return 1
    with load():
        if not all(passes(tests) for tests in files for _ in range(RUNS)):
            return 1
    tests = [test for tests in files for test in tests]
    often = note(tests, datetime.datetime.now(datetime.UTC).date())
    for test in tests:
        again = (
            "the third time within 30 days: a failure" if test in often else f"commit {LIST.name}"
        )
        print(f"UNSTEADY {test} ({again})")
    return int(bool(often))


if __name__ == "__main__":
    sys.exit(main())
