"""Runs the tests that failed three times more, with nothing beside them.

    make test | tee LOG; python3 .ci/second_look.py LOG

Many tests are of clocks: heartbeats, patience, deadlines. Beside others, on a machine that does
something else as well, one of a thousand of them may wait too long for a processor. So if pytest
ran to its end, and at most three tests failed, each of them is run again, alone. The exit status is
0 if all those runs pass; a test that fails again has failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"  # written by pytest
MOST_TESTS = 3
RUNS = 3
# Make's word for pytest's exit status 1: all tests were run, and some failed.
RAN_TO_ITS_END = re.compile(r"^make: \*\*\* \[.*\] Error 1$", re.M)


def failed_once(log: str) -> list[str]:
    """Return the tests that deserve a second look."""
    if not RAN_TO_ITS_END.search(log) or not FAILED.exists():
        return []
    tests = list(json.loads(FAILED.read_text()))
    return tests if len(tests) <= MOST_TESTS and all("::" in test for test in tests) else []


def passes(test: str) -> bool:
    """Return whether pytest runs this test, and it passes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfEs", test]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return done.returncode == 0 and " skipped" not in done.stdout.splitlines()[-1]


def main() -> int:
    """Look again at what `sys.argv[1]` tells of; return the exit status."""
    tests = failed_once(Path(sys.argv[1]).read_text(errors="replace"))
    if not tests:
        return 1
    return 0 if all(passes(test) for test in tests for _ in range(RUNS)) else 1


if __name__ == "__main__":
    sys.exit(main())
