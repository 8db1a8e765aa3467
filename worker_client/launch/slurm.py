"""SLURM: the tasks that srun starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from worker_client.launch.hostlist import hosts, tasks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker_client.launch.findings import Notes

_INTERACTIVE = {"bash", "interactive"}  # names of the jobs of shells


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of a step's tasks.

    A batch script has no step. A shell that srun opened is nobody's rank; what another srun starts
    out of it inherits its variables, but for the number of tasks.
    """
    shell = "SLURM_PTY_PORT" in environment or environment.get("SLURM_JOB_NAME") in _INTERACTIVE
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")
    return all(name in environment for name in names) and not (
        shell and environment.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    )


def job(environment: Mapping[str, str]) -> str:
    """Return the step's name; clusters that share a pool count their jobs alike."""
    cluster = environment.get("SLURM_CLUSTER_NAME", "").strip()
    step = environment.get("SLURM_STEP_ID", "0")
    return f"slurm-{cluster and f'{cluster}-'}{environment['SLURM_JOB_ID']}.{step}"


def task(notes: Notes) -> None:
    """Read what srun sets for a task."""
    notes.number("rank", "SLURM_PROCID")
    notes.number("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    notes.number("local_rank", "SLURM_LOCALID")
    notes.number("node_rank", "SLURM_NODEID")
    notes.number("nodes", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    names = hosts("SLURM_STEP_NODELIST", notes.get("SLURM_STEP_NODELIST"))
    notes.put("nodes", len(names), "SLURM_STEP_NODELIST")
    if notes.values["nodes"] != len(names):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={notes.get('SLURM_STEP_NODELIST')!r} has {len(names)} hosts, but "
            f"{notes.reasons['nodes']} says {notes.values['nodes']}"
        )
    if counts := notes.get("SLURM_STEP_TASKS_PER_NODE"):
        _count(notes, tasks("SLURM_STEP_TASKS_PER_NODE", counts), counts)
    notes.meeting_point()
    notes.put("master_addr", names[0], "first host of SLURM_STEP_NODELIST")
    notes.derived_port(job(notes.environment), "SLURM_JOB_ID and SLURM_STEP_ID")


def _count(notes: Notes, counts: list[int], text: str) -> None:
    said = notes.values
    if "world_size" in said and sum(counts) != said["world_size"]:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} makes {sum(counts)} tasks, but "
            f"{notes.reasons['world_size']} says {said['world_size']}"
        )
    if said.get("node_rank", len(counts)) < len(counts):
        notes.put("local_world_size", counts[said["node_rank"]], "SLURM_STEP_TASKS_PER_NODE")
