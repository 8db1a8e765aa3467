"""One image, one command and what Vertex AI sets: a primary, two workers, two reducers and an
evaluator on hosts of their own.
"""

import json
import re
from contextlib import ExitStack

import pytest

from lab import Lab
from tests.containers.images import ROOT
from tests.containers.podman import contained

pytestmark = pytest.mark.timeout(1200)  # it may have to build the image

REPLICAS = (1, 2, 2, 1)
SCRIPT = """
import os
if "RANK" in os.environ:
    exec(open("/examples/quickstart.py").read())
else:
    print("evaluates")
"""
SAID = re.compile(r"rank (\d): loss \S+, weights (\w+), (\d) reducers")


def test_every_pool_runs_the_same_image_and_command(base, worker_image, tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs the extra `manifests`")
    job = yaml.safe_load((ROOT / "docker/vertex/custom-job.yaml").read_text())
    container = job["workerPoolSpecs"][0]["containerSpec"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    tmp_path.chmod(0o755)
    with Lab(hosts=sum(REPLICAS), mbit=1000) as lab, ExitStack() as stack:
        hosts = iter(lab.hosts)
        pools = [[next(hosts) for _ in range(size)] for size in REPLICAS]
        cluster = {
            f"workerpool{at}": [f"{host.name}:2222" for host in pool]
            for at, pool in enumerate(pools)
        }

        def start(pool, index):
            task = {"type": f"workerpool{pool}", "index": index, "trial": "1"}
            spec = {"cluster": cluster, "environment": "cloud", "task": task}
            replica = contained(
                lab,
                pools[pool][index],
                worker_image,
                container["command"],
                env={**given, "CLUSTER_SPEC": json.dumps(spec)},
                volumes={script: "/workspace/train.py:ro", ROOT / "examples": "/examples:ro"},
            )
            return stack.enter_context(replica)

        replicas = [[start(pool, at) for at in range(size)] for pool, size in enumerate(REPLICAS)]
        primary, workers, reducers, [evaluator] = replicas
        ranks = [*primary, *workers]
        assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.logs() for rank in ranks]
        found = SAID.findall("".join(rank.logs() for rank in ranks))
        assert sorted(int(rank) for rank, _, _ in found) == [0, 1, 2]
        assert {servers for _, _, servers in found} == {"2"}
        assert len({weights for _, weights, _ in found}) == 1
        assert evaluator.wait() == 0, evaluator.logs()
        assert "evaluates" in evaluator.logs()
        for reducer in reducers:  # as Vertex AI does when the primary has ended
            assert reducer.stop() == 0
            assert re.search("stopped.* contributions=[1-9]", reducer.logs())
