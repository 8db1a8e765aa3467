"""What `launch` turns into, by who the process is and what was asked for."""

import sys

import pytest

from reducer.errors import ConfigError
from tests.launch.environments import (
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
from worker_client.launch import decide, resolve

SCRIPT = ["train.py", "--epochs", "5"]
PLAIN = (sys.executable, *SCRIPT)
TORCH = (sys.executable, "-m", "torch.distributed.run")
PRIMARY = "cmle-training-workerpool0-ab-0"
SERVERS = "cmle-training-workerpool2-ab-0:5555,cmle-training-workerpool2-ab-1:5555"
ONE_PER_NODE = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "node0",
}


def plan(environment, script=None, processes="auto", gpus=0):
    """Decide as the command does, on a machine with some GPUs."""
    return decide(
        resolve(environment),
        environment,
        SCRIPT if script is None else script,
        processes=processes,
        devices=lambda: gpus,
    )


def test_without_a_launcher_torchrun_starts_one_rank_for_each_gpu():
    alone = (*TORCH, "--standalone", "--nnodes", "1", "--nproc-per-node")
    assert plan({}).argv == (*alone, "1", *SCRIPT)
    assert plan({}, gpus=8).argv == (*alone, "8", *SCRIPT)
    assert plan({}, gpus=8, processes="2").argv == (*alone, "2", *SCRIPT)
    assert plan({}).sets == {}


def test_a_node_of_vertex_ai_meets_the_others_at_the_primary():
    found = plan(vertex(1, 1, trial="3"), gpus=4)
    shape = ("--nnodes", "3", "--node-rank", "2", "--nproc-per-node", "4")
    where = ("--master-addr", PRIMARY, "--master-port", "2222")
    assert found.argv == (*TORCH, *shape, *where, "--rdzv-id", f"{PRIMARY}-trial-3", *SCRIPT)
    assert found.sets == {"REDUCTION_SERVERS": SERVERS}


def test_reducers_that_the_user_named_are_left_alone():
    assert plan({**vertex(1, 1), "REDUCTION_SERVERS": "a:1"}).sets == {}
    assert plan({**vertex(1, 1), "REDUCTION_SERVERS": ""}).sets == {}


@pytest.mark.parametrize(
    "environment", [vertex(2, 1), {"TF_CONFIG": spec(TUNING_CLUSTER, "ps", 0)}]
)
def test_a_reducers_replica_serves(environment):
    serves = (sys.executable, "-m", "reducer", "serve")
    for name in ("REDUCTION_KEYS", "REDUCTION_INSECURE"):
        found = plan({**environment, name: "1"})
        assert found.argv == serves
        assert found.sets == {"REDUCTION_BIND": "tcp://0.0.0.0:5555"}
    private = {**environment, "REDUCTION_BIND": "tcp://127.0.0.1:7000"}
    assert plan(private, script=[]).sets == {"REDUCTION_BIND": "tcp://127.0.0.1:7000"}
    with pytest.raises(ConfigError, match=r"set REDUCTION_KEYS to .*or, .*REDUCTION_INSECURE=1"):
        plan(environment)


def test_an_evaluator_runs_the_script_as_it_is():
    found = plan(vertex(3, 0), processes="4", gpus=4)
    assert (found.argv, found.sets) == (PLAIN, {})


def test_a_rank_becomes_the_script_and_is_told_who_it_is_in_torchs_words():
    found = plan(SLURM)
    assert found.argv == PLAIN
    assert found.sets == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "2",
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": found.sets["MASTER_PORT"],
    }


def test_what_torchrun_has_started_is_not_told_anew():
    found = plan({**TORCHRUN, **vertex(1, 0)}, gpus=8)
    assert (found.argv, found.sets) == (PLAIN, {"REDUCTION_SERVERS": SERVERS})


def test_one_process_on_each_node_starts_the_others():
    shape = ("--nnodes", "8", "--node-rank", "5", "--nproc-per-node")
    for asked in ({"gpus": 4}, {"processes": "4"}):
        found = plan(ONE_PER_NODE, **asked)
        assert found.argv[: len(TORCH) + 6] == (*TORCH, *shape, "4")
        assert found.sets == {}
    assert plan(ONE_PER_NODE, gpus=1).argv == PLAIN
    assert plan(ONE_PER_NODE, gpus=4, processes="1").argv == PLAIN
    # Azure ML's job of one process on each node: LOCAL_RANK is 0 there, and may be so elsewhere.
    azure = {**ENV, "LOCAL_RANK": "0", "NODE_RANK": "1"}
    assert plan(azure, gpus=4).argv == PLAIN
    assert plan(azure, processes="4").argv[:3] == TORCH
    assert plan(ENV, gpus=4).argv[:3] == TORCH


@pytest.mark.parametrize(
    "environment", [OPEN_MPI, TORCHRUN, {**ENV, "LOCAL_RANK": "1"}], ids=["mpi", "torchrun", "env"]
)
def test_several_ranks_on_a_node_start_no_others(environment):
    with pytest.raises(ConfigError, match="--nproc-per-node 4 would start as many in each"):
        plan(environment, processes="4")


def test_kubeflow_has_told_torchrun_already():
    assert plan(KUBEFLOW).argv == (*TORCH, *SCRIPT)
    assert plan(KUBEFLOW, processes="2").argv == (*TORCH, "--nproc-per-node", "2", *SCRIPT)
    without = {name: value for name, value in KUBEFLOW.items() if name != "PET_NPROC_PER_NODE"}
    assert plan(without, gpus=2).argv == (*TORCH, "--nproc-per-node", "2", *SCRIPT)


def test_where_nobody_says_where_to_meet_the_user_must():
    with pytest.raises(ConfigError, match="Open MPI does not say where rank 0 is: set MASTER_ADDR"):
        plan(OPEN_MPI)
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        plan(MPICH)
    assert plan({**MPICH, "MASTER_ADDR": "node0"}).sets["MASTER_ADDR"] == "node0"


def test_modules_and_programs_can_be_run_as_well():
    module = ["-m", "training", "--epochs", "5"]
    assert plan(SLURM, module).argv == (sys.executable, *module)
    assert plan({}, module).argv[-4:] == tuple(module)
    program = ["accelerate-train", "-x"]
    assert plan(SLURM, program).argv == tuple(program)
    assert plan({}, program).argv[-3:] == ("--no-python", *program)


def test_mistakes_are_refused():
    with pytest.raises(ConfigError, match="nothing to run"):
        plan({}, [])
    for wrong in ("0", "gpu", "-1", "1.5"):
        with pytest.raises(ConfigError, match=f"--nproc-per-node: .*got '{wrong}'"):
            plan({}, processes=wrong)
