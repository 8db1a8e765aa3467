"""A job of Vertex AI: the command of docker/ in every replica, told apart by CLUSTER_SPEC alone."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab import Lab
from tests.launch.conftest import ROOT, bare_environment
from tests.launch.environments import spec
from tests.pages import FINGERPRINT

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


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_same_command_does_the_right_thing_in_every_pool(namespaces, tmp_path_factory):
    job = yaml.safe_load((ROOT / "docker/vertex/custom-job.yaml").read_text())
    container = job["workerPoolSpecs"][0]["containerSpec"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    program, *arguments, script_there = container["command"]
    assert program == "worker-client"
    script = tmp_path_factory.mktemp("vertex") / Path(script_there).name
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", "from worker_client.cli import main; main()"]
    command += [*arguments, str(script), "--epochs", "5"]
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
                **given,
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
        ranks, _, weights, servers = zip(*FINGERPRINT.findall(said), strict=True)
        assert sorted(ranks) == ["0", "1", "2"], said
        assert len(set(weights)) == 1
        assert set(servers) == {"2"}
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
