"""A whole job of Vertex AI: one command in every replica, told apart by CLUSTER_SPEC alone."""

import re
import signal
import subprocess
import sys

import pytest

from lab import Lab
from tests.launch.conftest import ROOT, bare_environment
from tests.launch.environments import spec

pytest.importorskip("torch", reason="needs torch")


SHAPE = (1, 2, 2, 1)  # replicas of each pool
# The user's own: trains, or evaluates where it is told no rank.
SCRIPT = f"""
import os, sys
if "RANK" not in os.environ:
    print("evaluates", *sys.argv[1:])
    sys.exit(3)
exec(open({str(ROOT / "examples" / "quickstart.py")!r}).read())
"""
SAID = re.compile(r"rank (\d+): loss [0-9.e+-]+, weights ([0-9a-f]{16}), (\d+) reducers")


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_same_command_does_the_right_thing_in_every_pool(namespaces, tmp_path_factory):
    script = tmp_path_factory.mktemp("vertex") / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", "from worker_client.cli import main; main()", "launch"]
    command += ["--", str(script), "--epochs", "5"]
    with Lab(hosts=sum(SHAPE), mbit=1000) as lab:
        free = iter(lab.hosts)
        pools = [[next(free) for _ in range(size)] for size in SHAPE]
        cluster = {
            f"workerpool{at}": [f"{host.name}:2222" for host in pool]
            for at, pool in enumerate(pools)
        }

        def start(pool, index):
            host = pools[pool][index]
            environment = bare_environment(
                CLUSTER_SPEC=spec(cluster, f"workerpool{pool}", index, trial="1"),
                # What the user's container has beside: nobody else is in the job's network.
                REDUCTION_INSECURE="1",
                GLOO_SOCKET_IFNAME="eth0",  # a lab's host does not resolve its own name
                RES_OPTIONS="timeout:1 attempts:1",  # nor has it a name server for others
            )
            return host.start(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )

        reducers = [start(2, index) for index in range(SHAPE[2])]
        workers = [start(0, 0), *(start(1, index) for index in range(SHAPE[1]))]
        [evaluator] = [start(3, 0)]
        said = "".join(worker.communicate(timeout=500)[0] for worker in workers)
        assert [worker.returncode for worker in workers] == [0] * len(workers), said
        found = SAID.findall(said)
        assert sorted(int(rank) for rank, _, _ in found) == [0, 1, 2], said
        assert len({weights for _, weights, _ in found}) == 1
        assert {reducers for _, _, reducers in found} == {"2"}
        evaluated = evaluator.communicate(timeout=60)[0]
        assert (evaluator.returncode, "evaluates --epochs 5" in evaluated) == (3, True), evaluated
        for reducer in reducers:  # as Vertex AI does when the primary has ended
            assert reducer.poll() is None
            reducer.send_signal(signal.SIGTERM)
        logs = [reducer.communicate(timeout=60)[0] for reducer in reducers]
    assert [reducer.returncode for reducer in reducers] == [0, 0], logs
    for log in logs:
        assert "this replica is a reducer" in log
        assert re.search(r"stopped.*contributions=[1-9]", log)
