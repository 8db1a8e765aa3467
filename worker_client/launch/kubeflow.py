"""Kubeflow's Trainer and JobSet: torchrun's own options, as PET_ variables of each pod."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from worker_client.launch.findings import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker_client.launch.findings import Notes


def is_pod(environment: Mapping[str, str]) -> bool:
    """Whether torchrun was told what to do, but has not done it yet."""
    return any(name in environment for name in ("PET_NNODES", "PET_MASTER_ADDR"))


def pod(notes: Notes) -> None:
    """Read what the Trainer sets in a pod; the index of an indexed job is the node's rank."""
    nodes = notes.get("PET_NNODES")
    if nodes and not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", nodes):
        refuse("PET_NNODES", "write a number of nodes, or MIN:MAX", nodes)
    # With MIN:MAX torchrun agrees on it, and on who is who, when the nodes meet.
    if nodes and ":" not in nodes:
        notes.number("nodes", "PET_NNODES", least=1)
        notes.number("node_rank", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    if processes := notes.get("PET_NPROC_PER_NODE"):
        if not re.fullmatch(r"auto|gpu|cpu|[1-9][0-9]{0,8}", processes):
            refuse("PET_NPROC_PER_NODE", "write a number, auto, gpu or cpu", processes)
        notes.put("processes", processes, "PET_NPROC_PER_NODE")
    if host := notes.get("PET_MASTER_ADDR"):
        notes.put("master_addr", host, "PET_MASTER_ADDR")
    notes.number("master_port", "PET_MASTER_PORT", least=1, most=65535)
    notes.meeting_point()
