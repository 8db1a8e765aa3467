"""Launchers that start one process for every rank: torchrun, env://, MPI, Azure ML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker_client.launch.findings import host_of, refuse, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker_client.launch.findings import Notes

AZURE_PORT = 6105  # Azure ML's own for PyTorch jobs; the batch service listens at the other one
# Launchers that are not served, and what they set: the process's number, and how many there are.
_NOT_SERVED = (
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MVAPICH", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    ("Platform MPI", "MPI_RANKID", "MPI_NRANKS"),
    ("PALS", "PALS_RANKID", "PALS_SIZE"),
    ("ALPS", "ALPS_APP_PE", ""),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("LSF", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PMIx", "PMIX_RANK", ""),
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PaddlePaddle", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    ("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    ("SageMaker", "", "SM_HOSTS"),
    ("Cloud TPU", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
    ("Lightning", "NODE_RANK", ""),
    ("env://", "LOCAL_RANK", ""),
    ("JAX", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("Volcano", "VC_TASK_INDEX", ""),
    ("Kubernetes' Indexed Job", "JOB_COMPLETION_INDEX", ""),
)
_AZURE = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")  # several nodes; one


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in environment


def is_env(environment: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE say who this is."""
    return bool(environment.get("RANK")) and bool(environment.get("WORLD_SIZE"))


def is_open_mpi(environment: Mapping[str, str]) -> bool:
    """Whether Open MPI's mpirun started this process."""
    return "OMPI_COMM_WORLD_RANK" in environment


def is_azure_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI job of Azure ML did."""
    return is_open_mpi(environment) and any(environment.get(name) for name in _AZURE)


def is_mpich(environment: Mapping[str, str]) -> bool:
    """Whether MPICH's or Intel's mpiexec started this process, and not SLURM in its stead."""
    own = environment.get("PMI_RANK")
    # srun serves the same protocol, and says more in variables of its own.
    return own is not None and not (
        "SLURM_STEP_ID" in environment and environment.get("SLURM_PROCID") == own
    )


def env(notes: Notes) -> None:
    """Read what torchrun sets, and launchers that imitate it."""
    notes.number("rank", "RANK")
    notes.number("world_size", "WORLD_SIZE", least=1)
    notes.number("local_rank", "LOCAL_RANK")
    notes.number("local_world_size", "LOCAL_WORLD_SIZE", least=1)
    notes.number("node_rank", "GROUP_RANK", "NODE_RANK")
    notes.meeting_point()
    if notes.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        notes.put("holds_port", True, "TORCHELASTIC_USE_AGENT_STORE")


def others(notes: Notes) -> None:
    """Find a variable by which this process, which nobody gives a rank, is one of several."""
    rank, size = notes.get("RANK"), notes.get("WORLD_SIZE")
    if rank and not size:
        notes.put("others", f"RANK={shown(rank)} without WORLD_SIZE", "RANK")
    elif not rank and size not in {"", "1"}:
        notes.put("others", f"WORLD_SIZE={shown(size)} without RANK", "WORLD_SIZE")
    for launcher, number, count in _NOT_SERVED:
        size = notes.get(count)
        # A list of hosts, or a number.
        several = "," in size or (size.isdecimal() and int(size) > 1)
        # Process 0 of nobody knows how many may be alone.
        if several or (not size and notes.get(number) not in {"", "0"}):
            name = count if size else number
            notes.put("others", f"{name}={shown(notes.get(name))} of {launcher}", name)


def open_mpi(notes: Notes) -> None:
    """Read what Open MPI's mpirun sets, in a job of Azure ML or elsewhere.

    OMPI_COMM_WORLD_NODE_RANK is not read: it is not the node's number.
    """
    notes.number("rank", "OMPI_COMM_WORLD_RANK")
    notes.number("world_size", "OMPI_COMM_WORLD_SIZE", least=1)
    notes.number("local_rank", "OMPI_COMM_WORLD_LOCAL_RANK")
    notes.number("local_world_size", "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    notes.meeting_point()
    for name in _AZURE:
        if value := notes.get(name):
            host = host_of(value)
            if host is None:
                refuse(name, "write host:port", value)
            notes.put("master_addr", host, name)
            notes.put("master_port", AZURE_PORT, "Azure ML's port for PyTorch")
    _complete(notes, notes.get("PMIX_NAMESPACE") or notes.get("OMPI_MCA_ess_base_jobid"))


def mpich(notes: Notes) -> None:
    """Read what MPICH's or Intel's mpiexec sets."""
    notes.number("rank", "PMI_RANK")
    notes.number("world_size", "PMI_SIZE", least=1)
    notes.number("local_rank", "MPI_LOCALRANKID")
    notes.number("local_world_size", "MPI_LOCALNRANKS", least=1)
    notes.meeting_point()
    _complete(notes, "")


def _complete(notes: Notes, namespace: str) -> None:
    """Conclude where ranks meet and which node this is, as far as that is certain."""
    said = notes.values
    size, local_size = said.get("world_size"), said.get("local_world_size")
    if local_size is not None and local_size == size:
        notes.put("node_rank", 0, "all ranks are on this node")
        notes.put("nodes", 1, "all ranks are on this node")
        notes.put("master_addr", "127.0.0.1", "all ranks are on this node")
    elif local_size == 1 and "rank" in said:
        # One process on this node; whether on every one nobody says, so `nodes` stays open.
        notes.put("node_rank", said["rank"], "the only rank on this node")
    notes.derived_port(namespace or "mpi", "the job's number" if namespace else "default")
