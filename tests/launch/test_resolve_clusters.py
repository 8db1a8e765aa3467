"""Roles and places that CLUSTER_SPEC and TF_CONFIG tell: Vertex AI, AI Platform, TensorFlow."""

import json

import pytest

from reducer.errors import ConfigError
from tests.launch.conclusions import concludes, refuses
from tests.launch.environments import (
    AI_PLATFORM_CLUSTER,
    AZURE_CLUSTER,
    ENV,
    TUNING_CLUSTER,
    spec,
    vertex,
)
from worker_client.launch import Launcher, Role, resolve

PRIMARY = "cmle-training-workerpool0-ab-0"
POOL = ("cmle-training-workerpool2-ab-0:5555", "cmle-training-workerpool2-ab-1:5555")
WORKER = spec(TUNING_CLUSTER, "worker", 0)


def cut(text, old, new):
    """Return JSON with a mistake in it."""
    assert old in text
    return text.replace(old, new)


# What all replicas of a job conclude, but for those whose case says something else.
OF_VERTEX = {
    "launcher": Launcher.VERTEX,
    "nodes": 3,
    "master_addr": PRIMARY,
    "master_port": 2222,
    "reducers": POOL,
    "job": PRIMARY,
}
OF_TF_CONFIG = {
    "launcher": Launcher.TF_CONFIG,
    "nodes": 3,
    "master_addr": "training-workerpool0-ab-0",
    "master_port": 2222,
    "reducers": ("training-workerpool2-ab-0:5555",),
}
CASES = {
    "Vertex AI, the primary": (vertex(0, 0), {**OF_VERTEX, "node_rank": 0}),
    "Vertex AI, the second worker of a trial": (
        vertex(1, 1, trial="3"),
        {
            **OF_VERTEX,
            "node_rank": 2,
            "job": f"{PRIMARY}-trial-3",
            "trial": "3",
        },
    ),
    "Vertex AI, a reducer": (vertex(2, 1), {**OF_VERTEX, "role": Role.REDUCER}),
    "Vertex AI, an evaluator": (vertex(3, 2), {**OF_VERTEX, "role": Role.EVALUATOR}),
    "Vertex AI, a reducer that is told RANK as well": (
        {**ENV, **vertex(2, 0)},
        {**OF_VERTEX, "role": Role.REDUCER, "master_addr": "node0", "master_port": 6105},
    ),
    "AI Platform, the master": (
        {"CLUSTER_SPEC": spec(AI_PLATFORM_CLUSTER, "master", 0)},
        {
            "launcher": Launcher.AI_PLATFORM,
            "node_rank": 0,
            "nodes": 3,
            "master_addr": "cmle-training-master-ab-0",
            "master_port": 2222,
            "reducers": ("cmle-training-ps-ab-0:5555",),
            "job": "cmle-training-master-ab-0",
        },
    ),
    "TF_CONFIG, a worker of a trial": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "worker", 0, trial="1", cloud="ab")},
        {**OF_TF_CONFIG, "node_rank": 1, "trial": "1"},
    ),
    "TF_CONFIG, a parameter server": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "ps", 0)},
        {**OF_TF_CONFIG, "role": Role.REDUCER},
    ),
    "TF_CONFIG, an evaluator, which no cluster names": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "evaluator", 0)},
        {**OF_TF_CONFIG, "role": Role.EVALUATOR},
    ),
    "TF_CONFIG, Azure ML's, without a chief": (
        {"TF_CONFIG": spec(AZURE_CLUSTER, "worker", 0)},
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 0,
            "nodes": 2,
            "master_addr": "host0",
            "master_port": 2222,
        },
    ),
    "TF_CONFIG, Kubeflow's": (
        {"TF_CONFIG": spec(AZURE_CLUSTER, "worker", 0), "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 0,
            "nodes": 2,
            "master_addr": "host0",
            "master_port": 2222,
            "job": "host0",
        },
    ),
    "TF_CONFIG of a pod's own ranks": (
        {
            "TF_CONFIG": spec({"worker": ["localhost.localdomain:1", "localhost:2"]}, "worker", 1),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        },
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 1,
            "nodes": 2,
            "master_addr": "localhost.localdomain",
            "master_port": 1,
        },
    ),
    "TF_CONFIG of machines that other jobs may use": (
        {"TF_CONFIG": spec({"worker": ["10.0.0.4:2222", "[::1]:2222"]}, "worker", 1)},
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 1,
            "nodes": 2,
            "master_addr": "10.0.0.4",
            "master_port": 2222,
        },
    ),
    "TF_CONFIG of IPv6": (
        {"TF_CONFIG": spec({"worker": ["[fd00::1]:2222", "[fd00::2]:2222"]}, "worker", 1)},
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 1,
            "nodes": 2,
            "master_addr": "fd00::1",
            "master_port": 2222,
        },
    ),
    "TF_CONFIG of one machine": (
        {"TF_CONFIG": spec({}, "master", 0)},
        {"launcher": Launcher.TF_CONFIG, "node_rank": 0, "nodes": 1},
    ),
    "TF_CONFIG, empty": (
        {"TF_CONFIG": "{}"},
        {"launcher": Launcher.TF_CONFIG, "node_rank": 0, "nodes": 1},
    ),
}
WRONG = {
    "no JSON": ({"TF_CONFIG": "{'cluster': {}}"}, "^TF_CONFIG: .* at character 1 .*cluster"),
    "JSON that ends": ({"CLUSTER_SPEC": '{"cluster": {'}, "^CLUSTER_SPEC: this is not JSON"),
    "JSON without end": ({"TF_CONFIG": "[" * 100_000}, "^TF_CONFIG: .* nested too deeply"),
    "a list": ({"TF_CONFIG": "[1]"}, r"^TF_CONFIG: write a JSON object \(got \[1\]\)"),
    "a cluster": ({"TF_CONFIG": '{"cluster": 1}'}, r"^TF_CONFIG cluster: .*got 1"),
    "replicas": (
        {"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'},
        r"^TF_CONFIG cluster\.worker: write a list of host:port \(got 'a:1'\)",
    ),
    "an address": (
        {"TF_CONFIG": cut(WORKER, "training-workerpool2-ab-0:2222", "tcp://a:1")},
        r"^TF_CONFIG cluster\.ps: write host:port \(got 'tcp://a:1'\)",
    ),
    "an address without a port": (
        {"TF_CONFIG": cut(WORKER, "training-workerpool2-ab-0:2222", "a")},
        r"^TF_CONFIG cluster\.ps: write host:port \(got 'a'\)",
    ),
    "the same address": (
        {"TF_CONFIG": cut(WORKER, "workerpool1-ab-1", "workerpool1-ab-0")},
        r"^TF_CONFIG cluster\.worker: an address appears twice .*workerpool1-ab-0:2222",
    ),
    "two chiefs": (
        {"TF_CONFIG": cut(WORKER, '0-ab-0:2222"]', '0-ab-0:2222", "b:1"]')},
        r"^TF_CONFIG cluster\.chief: exactly one replica leads \(got .*'b:1'",
    ),
    "chief and master": (
        {"TF_CONFIG": spec({**TUNING_CLUSTER, "master": ["m:1"]}, "chief", 0)},
        r"^TF_CONFIG cluster: .*chief or master \(got \['chief', 'master'\]\)",
    ),
    "an unknown pool": (
        {"CLUSTER_SPEC": spec({"workerpool0": ["a:1"], "workerpool4": ["b:1"]}, "x", 0)},
        r"^CLUSTER_SPEC cluster: known tasks are .*got 'workerpool4'",
    ),
    "names of both": (
        {"CLUSTER_SPEC": spec({"workerpool0": ["a:1"], "ps": ["b:1"]}, "ps", 0)},
        r"^CLUSTER_SPEC cluster: known tasks are workerpool0, .*got 'ps'",
    ),
    "an unknown task": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "scheduler", 0)},
        r"^TF_CONFIG task\.type: .*got 'scheduler'",
    ),
    "no task": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "worker", 2)},
        r"^TF_CONFIG task\.index: cluster\.worker has 2 replicas \(got 2\)",
    ),
    "a task that the cluster lacks": (
        {"TF_CONFIG": spec(AZURE_CLUSTER, "chief", 0)},
        r"^TF_CONFIG task\.index: cluster\.chief has 0 replicas",
    ),
    "other workers than those of a sparse cluster": (
        {"TF_CONFIG": '{"sparseCluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker"}}'},
        r"^TF_CONFIG sparseCluster: .*enableDynamicWorker.* \(got \{'worker': \{'1': 'a:1'\}\}\)",
    ),
    "a second replica without a cluster": (
        {"TF_CONFIG": spec({}, "worker", 1)},
        r"^TF_CONFIG task: it is none of the cluster's \(got .*'index': 1",
    ),
    "a cluster without a task": (
        {"TF_CONFIG": json.dumps({"cluster": AZURE_CLUSTER})},
        r"^TF_CONFIG task: it is none of the cluster's \(got None\)",
    ),
    "an index": (
        {"TF_CONFIG": cut(WORKER, '"index": 0', '"index": "a"')},
        r"^TF_CONFIG task\.index: .*got 'a'",
    ),
    "a type": (
        {"TF_CONFIG": cut(WORKER, '"type": "worker"', '"type": 1')},
        r"^TF_CONFIG task\.type: .*got 1",
    ),
    "what is a task": (
        {"TF_CONFIG": json.dumps({"cluster": AZURE_CLUSTER, "task": "worker"})},
        r"^TF_CONFIG task: .*got 'worker'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_it_is(case):
    concludes(*CASES[case])


@pytest.mark.parametrize("case", WRONG)
def test_what_is_malformed_or_contradicts_itself_is_quoted(case):
    refuses(*WRONG[case])


def test_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError) as caught:
        resolve({"TF_CONFIG": json.dumps({"cluster": "x" * 5000})})
    assert len(str(caught.value)) < 200
