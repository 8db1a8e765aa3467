"""SLURM's tasks, and the nodes of Kubeflow and JobSet."""

import pytest

from tests.launch.conclusions import concludes, refuses
from tests.launch.environments import KUBEFLOW, SLURM
from worker_client.launch import Launcher

OF_SLURM = {
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
}
CASES = {
    "SLURM": (SLURM, OF_SLURM),
    "SLURM, one of several clusters": (
        {**SLURM, "SLURM_CLUSTER_NAME": "east"},
        {**OF_SLURM, "job": "slurm-east-4711.0", "master_port": 28912},
    ),
    "SLURM, whose srun speaks PMI": ({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}, OF_SLURM),
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
}
WRONG = {
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
}


@pytest.mark.parametrize("case", CASES)
def test_who_it_is(case):
    concludes(*CASES[case])


@pytest.mark.parametrize("case", WRONG)
def test_what_is_malformed_or_contradicts_itself_is_quoted(case):
    refuses(*WRONG[case])
