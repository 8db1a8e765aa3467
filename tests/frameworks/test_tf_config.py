"""TensorFlow's own reading of TF_CONFIG is the judge of ours."""

import pytest

from tests.launch.environments import AZURE_CLUSTER, TUNING_CLUSTER, spec
from worker_client.launch import LauncherRole, resolve

tensorflow = pytest.importorskip("tensorflow", reason="needs TensorFlow")

ROLES = {"chief": LauncherRole.WORKER, "worker": LauncherRole.WORKER, "ps": LauncherRole.REDUCER}
ROLES["evaluator"] = LauncherRole.EVALUATOR


@pytest.mark.parametrize(
    ("cluster", "kind", "index"),
    [
        (TUNING_CLUSTER, "chief", 0),
        (TUNING_CLUSTER, "worker", 0),
        (TUNING_CLUSTER, "worker", 1),
        (TUNING_CLUSTER, "ps", 0),
        (TUNING_CLUSTER, "evaluator", 0),
        (AZURE_CLUSTER, "worker", 0),
        (AZURE_CLUSTER, "worker", 1),
    ],
)
def test_both_see_the_same_job(cluster, kind, index, monkeypatch):
    text = spec(cluster, kind, index, trial="1")
    monkeypatch.setenv("TF_CONFIG", text)
    theirs = tensorflow.distribute.cluster_resolver.TFConfigClusterResolver()
    ours = resolve({"TF_CONFIG": text})
    jobs = theirs.cluster_spec().as_dict()
    trains = jobs.get("chief", []) + jobs["worker"]
    assert ours.role is ROLES[theirs.task_type]
    assert ours.nodes == len(trains)
    assert f"{ours.master_addr}:{ours.master_port}" == trains[0]
    pool = [address.rpartition(":")[0] for address in jobs.get("ps", [])]
    assert [address.rpartition(":")[0] for address in ours.reducers] == pool
    if ours.role is LauncherRole.WORKER:
        assert ours.node_rank is not None
        mine = theirs.cluster_spec().task_address(theirs.task_type, theirs.task_id)
        assert trains[ours.node_rank] == mine
