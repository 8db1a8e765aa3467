"""`bench.sites`, with a site and a reducer that are killed."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

pytest.importorskip("torch", reason="needs torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.extended("tests/integration/test_faults.py", "tests/worker_client/test_outer.py")
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("namespaces")
def test_two_sites_learn_on_when_the_third_and_a_reducer_die(tmp_path):
    """That both end with the same weights is the command's own condition."""
    curves = tmp_path / "curves.json"
    far = ["--sites", "3", "--reducers", "2", "--mbit", "100", "--round-trip-ms", "100"]
    deaths = ["--site-dies", "60", "--reducer-dies", "80"]
    command = [sys.executable, "-m", "bench.sites", *far, *deaths, "--steps", "100"]
    command += ["--kinds", "streaming", "--curves", curves]
    done = run_command(*command, cwd=ROOT, timeout=540)
    assert done.returncode == 0, done.stderr
    row = re.search("^streaming" + r" +([\d.]+)" * 4 + "$", done.stdout, re.M)
    assert row is not None, done.stdout
    (curve,) = json.loads(curves.read_text()).values()
    assert list(curve) == [str(step) for step in range(5, 101, 5)]
    assert max(float(row[1]), curve["100"]) < curve["60"], "nothing is learned any more"
