"""The commands that torture jobs, in a short form: nothing is lost, and they say so."""

import re
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

pytestmark = pytest.mark.extended("tests/torture/test_guarantee.py::test_gradients")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rolling --reducers 2 --paces 50 --gaps 1", r" TERM (?s:.*) KILL +\d+ +0 +0 +yes\n"),
        ("chaos --kills 3 --workers 2 --reducers 2", r"steps lost +0\nweights identical +yes\n"),
        ("rank_loss --tries 2 --jobs 2", r"2 tries: .* misnamed 0"),
        ("rank_loss --tries 1 --embedded", r"1 tries: .* misnamed 0"),
    ],
)
def test_a_command_finds_nothing_wrong(command, said):
    module, *options = command.split()
    root = Path(__file__).parents[2]
    done = run_command(sys.executable, "-m", f"torture.{module}", *options, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(said, done.stdout), done.stdout
