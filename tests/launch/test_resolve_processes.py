"""Launchers that start every rank: torchrun, env://, MPI, Azure ML."""

import pytest

from tests.launch.conclusions import concludes, refuses
from tests.launch.environments import AZURE_MPI, ENV, MPICH, OPEN_MPI, TORCHRUN, vertex
from worker_client.launch import Launcher

OF_TORCHRUN = {
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
}
OF_ENV = {
    "launcher": Launcher.ENV,
    "rank": 1,
    "world_size": 2,
    "master_addr": "node0",
    "master_port": 6105,
}
OF_MPI = {
    "launcher": Launcher.OPEN_MPI,
    "rank": 5,
    "world_size": 8,
    "local_rank": 1,
    "local_world_size": 4,
    "master_port": 27966,
    "job": "mpi-583925761",
}
CASES = {
    "nothing": ({}, {}),
    "torchrun": (TORCHRUN, OF_TORCHRUN),
    "torchrun, and settings of our own": (
        {
            **TORCHRUN,
            **vertex(1, 0),
            "REDUCTION_SERVERS": "c:1, d:2,",
            "REDUCTION_JOB": "mine",
            "REDUCTION_GENERATION": "9",
        },
        {**OF_TORCHRUN, "reducers": ("c:1", "d:2"), "job": "mine", "generation": 9},
    ),
    "torchrun without a run id of its own": (
        {**ENV, "TORCHELASTIC_RUN_ID": "none"},
        {**OF_ENV, "launcher": Launcher.TORCHRUN},
    ),
    "torchrun, which lets the ranks meet itself": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        {**OF_TORCHRUN, "holds_port": True},
    ),
    "torchrun, which has the ranks do so": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        OF_TORCHRUN,
    ),
    "env://": (ENV, OF_ENV),
    "env:// with a rank alone": (
        {"RANK": "3"},
        {"rank": 3, "others": "RANK='3' without WORLD_SIZE"},
    ),
    "env:// with a zone": (
        {**ENV, "MASTER_ADDR": "fe80::215:5dff:fe33:ff6d%eth1"},
        {**OF_ENV, "master_addr": "fe80::215:5dff:fe33:ff6d%eth1"},
    ),
    "env:// with brackets, which torch does not take": (
        {**ENV, "MASTER_ADDR": "[fe80::1%eth1]"},
        {**OF_ENV, "master_addr": "fe80::1%eth1"},
    ),
    "Azure ML, a PyTorch job's process": (
        {**ENV, "NODE_RANK": "1", "LOCAL_RANK": "0", "AZUREML_RUN_ID": "run_ab"},
        {**OF_ENV, "local_rank": 0, "node_rank": 1, "job": "run_ab"},
    ),
    "Open MPI on several nodes": (OPEN_MPI, OF_MPI),
    "Open MPI on one node": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"},
        {
            **OF_MPI,
            "local_rank": 5,
            "local_world_size": 8,
            "node_rank": 0,
            "nodes": 1,
            "master_addr": "127.0.0.1",
        },
    ),
    "Azure ML, an MPI job of several nodes": (
        AZURE_MPI,
        {
            **OF_MPI,
            "launcher": Launcher.AZURE_ML,
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
}
WRONG = {
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
}


@pytest.mark.parametrize("case", CASES)
def test_who_it_is(case):
    concludes(*CASES[case])


@pytest.mark.parametrize("case", WRONG)
def test_what_is_malformed_or_contradicts_itself_is_quoted(case):
    refuses(*WRONG[case])
