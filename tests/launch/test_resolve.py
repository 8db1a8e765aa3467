"""Who a process is, by every launcher's variables; and what malformed ones are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reducer.errors import ConfigError
from tests.launch.environments import (
    AI_PLATFORM_CLUSTER,
    AZURE_CLUSTER,
    ENV,
    KUBEFLOW,
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    TUNING_CLUSTER,
    spec,
    vertex,
)
from worker_client.launch import Launcher, Resolved, Role, resolve

PRIMARY = "cmle-training-workerpool0-ab-0"
POOL = ("cmle-training-workerpool2-ab-0:5555", "cmle-training-workerpool2-ab-1:5555")
AZURE_MPI = {**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZUREML_RUN_ID": "run_ab"}

# What is set, and what is to be concluded; what is not named is to be None, or as by default.
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "torchrun": (
        TORCHRUN,
        {
            "launcher": Launcher.TORCHRUN,
            "rank": 5,
            "world_size": 8,
            "local_rank": 1,
            "local_world_size": 4,
            "node_rank": 1,
            "master_addr": "node0",
            "master_port": 29400,
            "job": "run-7",
            "generation": 2,
            "restarts": 2,
        },
    ),
    "torchrun without a run id of its own": (
        {**ENV, "TORCHELASTIC_RUN_ID": "none"},
        {
            "launcher": Launcher.TORCHRUN,
            "rank": 1,
            "world_size": 2,
            "master_addr": "node0",
            "master_port": 6105,
        },
    ),
    "env://": (
        ENV,
        {
            "launcher": Launcher.ENV,
            "rank": 1,
            "world_size": 2,
            "master_addr": "node0",
            "master_port": 6105,
        },
    ),
    "env:// with a rank alone": ({"RANK": "3"}, {"rank": 3}),
    "Azure ML, a PyTorch job's process": (
        {**ENV, "NODE_RANK": "1", "LOCAL_RANK": "0", "AZUREML_RUN_ID": "run_ab"},
        {
            "launcher": Launcher.ENV,
            "rank": 1,
            "world_size": 2,
            "local_rank": 0,
            "node_rank": 1,
            "master_addr": "node0",
            "master_port": 6105,
            "job": "run_ab",
        },
    ),
    "Open MPI on several nodes": (
        OPEN_MPI,
        {
            "launcher": Launcher.OPEN_MPI,
            "rank": 5,
            "world_size": 8,
            "local_rank": 1,
            "local_world_size": 4,
            "master_port": 27966,
            "job": "mpi-583925761",
        },
    ),
    "Open MPI on one node": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"},
        {
            "launcher": Launcher.OPEN_MPI,
            "rank": 5,
            "world_size": 8,
            "local_rank": 5,
            "local_world_size": 8,
            "node_rank": 0,
            "nodes": 1,
            "master_addr": "127.0.0.1",
            "master_port": 27966,
            "job": "mpi-583925761",
        },
    ),
    "Azure ML, an MPI job of several nodes": (
        AZURE_MPI,
        {
            "launcher": Launcher.AZURE_ML,
            "rank": 5,
            "world_size": 8,
            "local_rank": 1,
            "local_world_size": 4,
            "master_addr": "10.0.0.4",
            "master_port": 6105,
            "job": "run_ab",
        },
    ),
    "Azure ML, an MPI job of one node": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "AZ_BATCHAI_MPI_MASTER_NODE": "localhost",
            "MASTER_PORT": "54965",
        },
        {
            "launcher": Launcher.AZURE_ML,
            "rank": 1,
            "world_size": 4,
            "local_rank": 1,
            "local_world_size": 4,
            "node_rank": 0,
            "nodes": 1,
            "master_addr": "localhost",
            "master_port": 54965,
        },
    ),
    "MPICH": (
        MPICH,
        {
            "launcher": Launcher.MPICH,
            "rank": 3,
            "world_size": 4,
            "local_rank": 1,
            "local_world_size": 2,
            "master_port": 23595,
        },
    ),
    "SLURM": (
        SLURM,
        {
            "launcher": Launcher.SLURM,
            "rank": 4,
            "world_size": 5,
            "local_rank": 0,
            "local_world_size": 1,
            "node_rank": 2,
            "nodes": 3,
            "master_addr": "gpu01",
            "master_port": 21091,
            "job": "slurm-4711.0",
            "generation": 1,
            "restarts": 1,
        },
    ),
    "SLURM, whose srun speaks PMI": (
        {**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"},
        {
            "launcher": Launcher.SLURM,
            "rank": 4,
            "world_size": 5,
            "local_rank": 0,
            "local_world_size": 1,
            "node_rank": 2,
            "nodes": 3,
            "master_addr": "gpu01",
            "master_port": 21091,
            "job": "slurm-4711.0",
            "generation": 1,
            "restarts": 1,
        },
    ),
    "SLURM, a shell that srun opened": (
        {**SLURM, "SLURM_PTY_PORT": "17154", "SLURM_STEP_NUM_TASKS": "1"},
        {"generation": 1, "restarts": 1},
    ),
    "SLURM, a batch script": (
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"},
        {},
    ),
    "Kubeflow": (
        KUBEFLOW,
        {
            "launcher": Launcher.KUBEFLOW,
            "node_rank": 3,
            "nodes": 4,
            "processes": "auto",
            "master_addr": "digits-node-0-0.digits",
            "master_port": 29400,
        },
    ),
    "Kubeflow, a JobSet's index": (
        {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "PET_MASTER_ADDR": "a-w-0-0.a"},
        {
            "launcher": Launcher.KUBEFLOW,
            "node_rank": 1,
            "nodes": 2,
            "master_addr": "a-w-0-0.a",
        },
    ),
    "Kubeflow, elastic": (
        {**KUBEFLOW, "PET_NNODES": "1:4"},
        {
            "launcher": Launcher.KUBEFLOW,
            "processes": "auto",
            "master_addr": "digits-node-0-0.digits",
            "master_port": 29400,
        },
    ),
    "Vertex AI, the primary": (
        vertex(0, 0),
        {
            "launcher": Launcher.VERTEX,
            "node_rank": 0,
            "nodes": 3,
            "master_addr": PRIMARY,
            "master_port": 2222,
            "reducers": POOL,
            "job": PRIMARY,
        },
    ),
    "Vertex AI, the second worker of a trial": (
        vertex(1, 1, trial="3"),
        {
            "launcher": Launcher.VERTEX,
            "node_rank": 2,
            "nodes": 3,
            "master_addr": PRIMARY,
            "master_port": 2222,
            "reducers": POOL,
            "job": f"{PRIMARY}-trial-3",
            "trial": "3",
        },
    ),
    "Vertex AI, a reducer": (
        vertex(2, 1),
        {
            "launcher": Launcher.VERTEX,
            "role": Role.REDUCER,
            "nodes": 3,
            "master_addr": PRIMARY,
            "master_port": 2222,
            "reducers": POOL,
            "job": PRIMARY,
        },
    ),
    "Vertex AI, an evaluator": (
        vertex(3, 2),
        {
            "launcher": Launcher.VERTEX,
            "role": Role.EVALUATOR,
            "nodes": 3,
            "master_addr": PRIMARY,
            "master_port": 2222,
            "reducers": POOL,
            "job": PRIMARY,
        },
    ),
    "Vertex AI, a reducer that is told RANK as well": (
        {**ENV, **vertex(2, 0)},
        {
            "launcher": Launcher.VERTEX,
            "role": Role.REDUCER,
            "nodes": 3,
            "master_addr": "node0",
            "master_port": 6105,
            "reducers": POOL,
            "job": PRIMARY,
        },
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
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 1,
            "nodes": 3,
            "master_addr": "training-workerpool0-ab-0",
            "master_port": 2222,
            "reducers": ("training-workerpool2-ab-0:5555",),
            "job": "training-workerpool0-ab-0-trial-1",
            "trial": "1",
        },
    ),
    "TF_CONFIG, a parameter server": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "ps", 0)},
        {
            "launcher": Launcher.TF_CONFIG,
            "role": Role.REDUCER,
            "nodes": 3,
            "master_addr": "training-workerpool0-ab-0",
            "master_port": 2222,
            "reducers": ("training-workerpool2-ab-0:5555",),
            "job": "training-workerpool0-ab-0",
        },
    ),
    "TF_CONFIG, an evaluator, which no cluster names": (
        {"TF_CONFIG": spec(TUNING_CLUSTER, "evaluator", 0)},
        {
            "launcher": Launcher.TF_CONFIG,
            "role": Role.EVALUATOR,
            "nodes": 3,
            "master_addr": "training-workerpool0-ab-0",
            "master_port": 2222,
            "reducers": ("training-workerpool2-ab-0:5555",),
            "job": "training-workerpool0-ab-0",
        },
    ),
    "TF_CONFIG, Azure ML's, without a chief": (
        {"TF_CONFIG": spec(AZURE_CLUSTER, "worker", 0)},
        {
            "launcher": Launcher.TF_CONFIG,
            "node_rank": 0,
            "nodes": 2,
            "master_addr": "host0",
            "master_port": 2222,
            "job": "host0",
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
    "settings of our own": (
        {
            **TORCHRUN,
            **vertex(1, 0),
            "REDUCTION_SERVERS": "c:1, d:2,",
            "REDUCTION_JOB": "mine",
            "REDUCTION_GENERATION": "9",
        },
        {
            "launcher": Launcher.TORCHRUN,
            "rank": 5,
            "world_size": 8,
            "local_rank": 1,
            "local_world_size": 4,
            "node_rank": 1,
            "master_addr": "node0",
            "master_port": 29400,
            "reducers": ("c:1", "d:2"),
            "job": "mine",
            "generation": 9,
            "restarts": 2,
        },
    ),
}
FIELDS = set(Resolved.__dataclass_fields__) - {"reasons", "also"}


@pytest.mark.parametrize("case", CASES)
def test_every_launcher(case: str) -> None:
    environment, expected = CASES[case]
    found = resolve({"PATH": "/bin", "HOME": "/root", **environment})
    default = Resolved()
    assert {name: getattr(found, name) for name in FIELDS} == {
        name: expected.get(name, getattr(default, name)) for name in FIELDS
    }
    for name in expected.keys() - {"launcher", "role"}:
        assert found.reasons[name], f"nobody said {name}"


@pytest.mark.parametrize(
    ("environments", "expected", "also"),
    [
        ([TORCHRUN, AZURE_MPI, SLURM], Launcher.TORCHRUN, [Launcher.AZURE_ML, Launcher.SLURM]),
        ([TORCHRUN, vertex(0, 0)], Launcher.TORCHRUN, [Launcher.VERTEX]),
        ([ENV, vertex(1, 0)], Launcher.ENV, [Launcher.VERTEX]),
        ([ENV, KUBEFLOW], Launcher.KUBEFLOW, [Launcher.ENV]),
        ([ENV, {"LOCAL_RANK": "1"}, KUBEFLOW], Launcher.ENV, [Launcher.KUBEFLOW]),
        ([OPEN_MPI, SLURM], Launcher.OPEN_MPI, [Launcher.SLURM]),
        ([MPICH, SLURM], Launcher.MPICH, [Launcher.SLURM]),
        ([ENV, vertex(2, 0)], Launcher.VERTEX, [Launcher.ENV]),
    ],
)
def test_who_goes_before(
    environments: list[dict[str, str]], expected: Launcher, also: list[Launcher]
) -> None:
    merged = {name: value for one in environments for name, value in one.items()}
    found = resolve(merged)
    assert found.launcher is expected
    assert [other for other in found.also if other is not Launcher.ENV] == [
        other for other in also if other is not Launcher.ENV
    ]


def test_one_process_on_each_node_is_its_rank() -> None:
    assert resolve(vertex(1, 1)).identity == (2, 3)
    assert resolve(TORCHRUN).identity == (5, 8)
    assert resolve({}).identity == (None, None)
    assert resolve(vertex(2, 1)).identity == (None, 3)


def cut(text: str, old: str, new: str) -> str:
    """Return JSON with a mistake in it."""
    assert old in text
    return text.replace(old, new)


WORKER = spec(TUNING_CLUSTER, "worker", 0)
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "a word": ({"RANK": "first"}, r"^RANK: write an integer \(got 'first'\)"),
    "a fraction": ({**ENV, "WORLD_SIZE": "2.0"}, r"^WORLD_SIZE: .*got '2\.0'"),
    "below zero": ({**ENV, "RANK": "-1"}, r"^RANK: write an integer from 0 to .*got '-1'"),
    "an empty world": ({**ENV, "WORLD_SIZE": "0"}, r"^WORLD_SIZE: .*from 1 to"),
    "beyond the world": (
        {**ENV, "RANK": "2"},
        r"^RANK and WORLD_SIZE contradict each other: rank 2 .* world_size 2",
    ),
    "beyond the node": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "4"},
        "^OMPI_COMM_WORLD_LOCAL_RANK and OMPI_COMM_WORLD_LOCAL_SIZE contradict .* local_rank 4",
    ),
    "a node beyond the world": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"},
        "^OMPI_COMM_WORLD_LOCAL_SIZE and OMPI_COMM_WORLD_SIZE contradict",
    ),
    "no port": ({**ENV, "MASTER_PORT": "70000"}, r"^MASTER_PORT: .*65535 \(got '70000'\)"),
    "a host with a port": ({**ENV, "MASTER_ADDR": "a:1"}, r"^MASTER_ADDR: .*got 'a:1'"),
    "Azure's address": (
        {**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:port"},
        r"^AZ_BATCH_MASTER_NODE: write host:port \(got '10\.0\.0\.4:port'\)",
    ),
    "nodes": ({**KUBEFLOW, "PET_NNODES": "two"}, r"^PET_NNODES: .*got 'two'"),
    "a node that is none": (
        {**KUBEFLOW, "PET_NODE_RANK": "4"},
        "^PET_NODE_RANK and PET_NNODES contradict",
    ),
    "processes": (
        {**KUBEFLOW, "PET_NPROC_PER_NODE": "many"},
        r"^PET_NPROC_PER_NODE: .*got 'many'",
    ),
    "a list of hosts": (
        {**SLURM, "SLURM_STEP_NODELIST": "gpu[01-"},
        r"^SLURM_STEP_NODELIST: .*got 'gpu\[01-'",
    ),
    "as many hosts": (
        {**SLURM, "SLURM_STEP_NODELIST": "gpu[01-02]"},
        r"^SLURM_STEP_NODELIST='gpu\[01-02\]' has 2 hosts, but SLURM_STEP_NUM_NODES says 3",
    ),
    "as many tasks": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        r"^SLURM_STEP_TASKS_PER_NODE='2\(x3\)' makes 6 tasks, but SLURM_NTASKS says 5",
    ),
    "tasks": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(3)"}, r"_NODE: .*got '2\(3\)'"),
    "no JSON": ({"TF_CONFIG": "{'cluster': {}}"}, "^TF_CONFIG: .* at character 1 .*cluster"),
    "JSON that ends": ({"CLUSTER_SPEC": '{"cluster": {'}, "^CLUSTER_SPEC: this is not JSON"),
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


@pytest.mark.parametrize("case", WRONG)
def test_what_is_malformed_or_contradicts_itself_is_quoted(case: str) -> None:
    environment, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        resolve(environment)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"TF_CONFIG": json.dumps({"cluster": "x" * 5000})})
    assert len(str(caught.value)) < 200
