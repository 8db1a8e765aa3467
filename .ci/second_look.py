"""Runs the tests that failed three times more, with nothing beside them.

    make test | tee LOG; python3 .ci/second_look.py LOG

Many tests are of clocks: heartbeats, patience, deadlines. Beside others, on a machine that does
something else as well, one of a thousand of them may wait too long for a processor, or a fixture of
several may. So if pytest ran to its end, and tests of at most three files failed, those of each
file are run again, alone. The exit status is 0 if all those runs pass; a test that fails again has
failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"  # written by pytest
MOST_FILES = 3
RUNS = 3
# Make's word for pytest's exit status 1: all tests were run, and some failed.
RAN_TO_ITS_END = re.compile(r"^make: \*\*\* \[.*\] Error 1$", re.M)


def failed_once(log: str) -> list[list[str]]:
    """Return the tests that deserve a second look, those of a file together."""
    if not RAN_TO_ITS_END.search(log) or not FAILED.exists():
        return []
    files: dict[str, list[str]] = {}
    for test in json.loads(FAILED.read_text()):
        file, _, name = test.partition("::")
        if not name:  # a file that could not be read
            return []
        files.setdefault(file, []).append(test)
    return list(files.values()) if len(files) <= MOST_FILES else []


def passes(tests: list[str]) -> bool:
    """Return whether pytest runs these tests, and all pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfEs", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return done.returncode == 0 and " skipped" not in done.stdout.splitlines()[-1]


def main() -> int:
    """Look again at what `sys.argv[1]` tells of; return the exit status."""
    files = failed_once(Path(sys.argv[1]).read_text(errors="replace"))
    if not files:
        return 1
    return 0 if all(passes(tests) for tests in files for _ in range(RUNS)) else 1


if __name__ == "__main__":
    sys.exit(main())
