"""Who goes before whom, where several say who a process is."""

import re

import pytest

from reducer.errors import ConfigError
from tests.launch.environments import (
    AZURE_MPI,
    ENV,
    KUBEFLOW,
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    vertex,
)
from worker_client.launch import Launcher, decide, resolve


@pytest.mark.parametrize(
    ("environments", "expected", "also"),
    [
        ([TORCHRUN, AZURE_MPI, SLURM], Launcher.TORCHRUN, [Launcher.AZURE_ML, Launcher.SLURM]),
        ([TORCHRUN, vertex(0, 0)], Launcher.TORCHRUN, [Launcher.VERTEX]),
        ([ENV, {"WORLD_SIZE": "3"}, vertex(1, 0)], Launcher.ENV, [Launcher.VERTEX]),
        ([ENV, KUBEFLOW], Launcher.KUBEFLOW, [Launcher.ENV]),
        ([ENV, {"LOCAL_RANK": "1"}, KUBEFLOW], Launcher.ENV, [Launcher.KUBEFLOW]),
        ([OPEN_MPI, SLURM], Launcher.OPEN_MPI, [Launcher.SLURM]),
        ([MPICH, SLURM], Launcher.MPICH, [Launcher.SLURM]),
        ([ENV, vertex(2, 0)], Launcher.VERTEX, [Launcher.ENV]),
    ],
)
def test_who_goes_before(environments, expected, also):
    merged = {name: value for one in environments for name, value in one.items()}
    found = resolve(merged)
    assert found.launcher is expected
    assert [other for other in found.also if other is not Launcher.ENV] == [
        other for other in also if other is not Launcher.ENV
    ]


def test_one_process_on_each_node_is_its_rank():
    assert resolve(vertex(1, 1)).identity == (2, 3)
    assert resolve(TORCHRUN).identity == (5, 8)
    assert resolve({}).identity == (None, None)
    assert resolve(vertex(2, 1)).identity == (None, 3)


ALONE = {"PATH": "/bin", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
NOT_ALONE = [
    ({"RANK": "0"}, "RANK='0' without WORLD_SIZE"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE='4' without RANK"),
    (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"},
        "MV2_COMM_WORLD_SIZE='4' of MVAPICH2",
    ),
    (
        {"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "4"},
        "MVP_COMM_WORLD_SIZE='4' of MVAPICH",
    ),
    ({"MPI_RANKID": "1", "MPI_NRANKS": "4"}, "MPI_NRANKS='4' of Platform MPI"),
    ({"PALS_RANKID": "1"}, "PALS_RANKID='1' of PALS"),
    ({"ALPS_APP_PE": "7"}, "ALPS_APP_PE='7' of ALPS"),
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE='4' of Flux"),
    ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE='4' of LSF"),
    ({"PMIX_RANK": "1"}, "PMIX_RANK='1' of PMIx"),
    ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE='2' of Horovod"),
    ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINERS_NUM='2' of Paddle"),
    ({"AWS_BATCH_JOB_NUM_NODES": "2"}, "AWS_BATCH_JOB_NUM_NODES='2' of AWS Batch"),
    ({"SM_HOSTS": '["algo-1","algo-2"]'}, 'SM_HOSTS=\'["algo-1","algo-2"]\' of SageMaker'),
    ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, "TPU_WORKER_HOSTNAMES='t0,t1' of Cloud TPU"),
    ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES='2' of JAX"),
    ({"VC_TASK_INDEX": "1"}, "VC_TASK_INDEX='1' of Volcano"),
    ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX='1' of Kubernetes' Indexed Job"),
    ({"NODE_RANK": "1"}, "NODE_RANK='1' of Lightning"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK='1' of env://"),
    ({"TF_CONFIG": "{}", "WORLD_SIZE": "4"}, "WORLD_SIZE='4' without RANK"),
]


@pytest.mark.parametrize(("environment", "said"), NOT_ALONE, ids=[said for _, said in NOT_ALONE])
def test_what_was_started_with_others_is_not_taken_for_a_job_of_one(environment, said):
    found = resolve({**ALONE, **environment})
    with pytest.raises(ConfigError) as error:
        found.check_alone()
    for part in (said, "set RANK and WORLD_SIZE", f"unset {said.partition('=')[0]} if it is alone"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match=re.escape(said)):
        decide(found, {}, ["train.py"], processes="auto", devices=lambda: 0)
    resolve({**ALONE, **environment, **TORCHRUN}).check_alone()  # who started last knows best


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"LOCAL_RANK": "0", "NODE_RANK": "0"},
        {"PMIX_RANK": "0"},  # as a shell of srun has it
        {"SM_HOSTS": '["algo-1"]'},
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
    ],
)
def test_a_process_that_is_alone_is_a_job_of_one(environment):
    resolve({**ALONE, **environment}).check_alone()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (vertex(1, 1), {"RANK": "2", "WORLD_SIZE": "5"}),  # of all replicas
        (vertex(1, 1), {"RANK": "1", "WORLD_SIZE": "3"}),
        (vertex(0, 0), {"RANK": "0", "WORLD_SIZE": "1"}),
    ],
)
def test_a_rank_that_contradicts_the_cluster_is_refused(place, told):
    with pytest.raises(ConfigError) as error:
        resolve({**place, **told})
    assert "RANK={RANK} and WORLD_SIZE={WORLD_SIZE} contradict CLUSTER_SPEC".format(**told) in str(
        error.value
    )
    resolve({**place, **told, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})  # counts processes
