"""The elastic example where a host vanishes: torchrun's ranks, one on each, and a newcomer."""

import re
import sys
import time

import pytest

from harness import ROOT, pool
from lab import Lab

for package in ("torch", "sklearn"):
    pytest.importorskip(package, reason=f"needs {package}")

EXAMPLE = ["examples/elastic_digits.py", "--steps", "300", "--pause", "0.02"]
RANKS = 3
MBIT = 100
WAIT_S = 60.0


def waits_for(said, pattern):
    """Return the first match in what a process has said."""
    deadline = time.monotonic() + WAIT_S
    while (found := re.search(pattern, said.read_text())) is None:
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)
    return found[0]


@pytest.mark.extended("tests/integration/test_join.py")
@pytest.mark.timeout(200)
def test_a_host_vanishes_and_another_one_joins(namespaces, tmp_path):
    with Lab(RANKS + 2, MBIT) as lab:
        *nodes, newcomer, reducers = lab.hosts
        (reducer,) = pool.start([reducers])
        settings = {"REDUCTION_SERVERS": reducer.address, "REDUCTION_JOB": "digits"}

        def start(host, command, **more):
            path = tmp_path / host.name
            with path.open("w") as file:
                environment = {"PYTHONPATH": str(ROOT), **settings, **more}
                host.start([sys.executable, *command], environment, file, file, cwd=ROOT)
            return path

        torchrun = ["-m", "torch.distributed.run", f"--nnodes={RANKS}", "--nproc-per-node=1"]
        torchrun += [f"--master-addr={nodes[0].address}", "--master-port=29500", "--max-restarts=0"]
        said = [
            start(node, [*torchrun, f"--node-rank={rank}", *EXAMPLE])
            for rank, node in enumerate(nodes)
        ]
        waits_for(said[0], r"step \d+: .*ranks \(0, 1, 2\)")
        lab.link_down(nodes[2])
        waits_for(said[0], r"step \d+: .*ranks \(0, 1\)")
        said[2] = start(newcomer, EXAMPLE, REDUCTION_JOIN="1")
        waits_for(said[0], r"step \d+: .*ranks \(0, 1, 3\)")
        ends = {waits_for(output, r"ends with weights \w+") for output in said}
        assert len(ends) == 1
