"""Two nodes of four ranks: what their network cards carry."""

import sys

import pytest

from tests.commands import run_command
from tests.ranks import ROOT

pytest.importorskip("torch", reason="needs torch")


@pytest.mark.extended("tests/integration/test_nodes_ddp.py")
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("namespaces")
def test_a_nodes_card_carries_each_buffer_once():
    sizes = ("--nodes=2", "--local=4", "--reducers=2", "--mbit=25", "--size=4MiB", "--rounds=2")
    done = run_command(sys.executable, "-m", "bench.hierarchy", *sizes, cwd=ROOT)
    assert done.returncode == 0, done.stderr  # not so if an element is wrong
    found = {
        mode: list(map(float, figures[:3]))
        for mode, *figures in map(str.split, done.stdout.splitlines())
        if mode in {"flat", "hierarchical"}
    }
    _, sent, received = found["hierarchical"]
    assert 1.0 <= sent <= 1.05
    assert 1.0 <= received <= 1.05
    assert found["flat"][1] > 4.0
