"""CLUSTER_SPEC and TF_CONFIG: JSON that names every replica of a job, and which one this is."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from worker_client.launch.findings import host_of, refuse
from worker_client.launch.resolved import Launcher, LauncherRole

if TYPE_CHECKING:
    from worker_client.launch.findings import Notes


# Which tasks lead, work, reduce and evaluate, in the order of the nodes' ranks.
_VERTEX = (("workerpool0",), "workerpool1", "workerpool2", "workerpool3")
_TENSORFLOW = (("chief", "master"), "worker", "ps", "evaluator")


class Cluster(NamedTuple):
    """One replica's view of its job."""

    launcher: Launcher
    role: LauncherRole
    node_rank: int | None  # among those that train
    workers: tuple[str, ...]  # addresses of those that train, by rank
    reducers: tuple[str, ...]  # hosts
    trial: str | None
    where: str  # the part of the JSON that says which task this is


def read(name: str, text: str) -> Cluster:
    """Read the value of CLUSTER_SPEC or TF_CONFIG, which `name` says.

    Raises:
        ConfigError: it is malformed, or contradicts itself; the message quotes the offending part.
    """
    spec = _parse(name, text)
    cluster = _tasks(name, spec.get("cluster"))
    vertex = any(task.startswith("workerpool") for task in cluster)
    leaders, worker, reducer, evaluator = _VERTEX if vertex else _TENSORFLOW
    known = {*leaders, worker, reducer, evaluator}
    for task in cluster:
        if task not in known:
            refuse(f"{name} cluster", f"known tasks are {', '.join(sorted(known))}", task)
    present = [leader for leader in leaders if leader in cluster]
    if len(present) > 1:
        refuse(f"{name} cluster", "one of them leads, chief or master", present)
    for leader in present:
        if len(cluster[leader]) > 1:
            refuse(f"{name} cluster.{leader}", "exactly one replica leads", cluster[leader])
    workers = [address for leader in present for address in cluster[leader]]
    workers += cluster.get(worker, [])
    launcher = Launcher.TF_CONFIG
    if name == "CLUSTER_SPEC":
        launcher = Launcher.VERTEX if vertex else Launcher.AI_PLATFORM
    kind, index, trial = _task(name, spec.get("task"))
    alone = kind == "" or (not cluster and kind in {*leaders, worker})
    if not alone and kind not in known:
        refuse(f"{name} task.type", f"write one of {', '.join(sorted(known))}", kind)
    if alone and (index or sum(map(len, cluster.values())) > 1):
        refuse(f"{name} task", "it is none of the cluster's", spec.get("task"))
    # TensorFlow's evaluator is none of the cluster's tasks, so its index means nothing there.
    if not alone and kind != evaluator and index >= len(cluster.get(kind, [])):
        has = f"cluster.{kind} has {len(cluster.get(kind, []))} replicas"
        refuse(f"{name} task.index", has, index)
    role, rank = LauncherRole.WORKER, 0 if alone or kind in leaders else index + len(present)
    if kind == reducer:
        role = LauncherRole.REDUCER
    elif kind == evaluator:
        role = LauncherRole.EVALUATOR
    return Cluster(
        launcher,
        role,
        rank if role is LauncherRole.WORKER else None,
        tuple(workers),
        tuple(_host(address) for address in cluster.get(reducer, [])),
        trial,
        f"{name} task {kind} {index}".rstrip() if not alone else name,
    )


def node(notes: Notes, name: str, cluster: Cluster) -> None:
    """Record a replica's place among those that train."""
    if cluster.node_rank is not None:
        notes.put("node_rank", cluster.node_rank, cluster.where)
    notes.put("nodes", max(1, len(cluster.workers)), f"{name} cluster")
    notes.meeting_point()
    if cluster.workers:
        host, _, port = cluster.workers[0].rpartition(":")
        notes.put("master_addr", host.strip("[]"), f"{name} cluster, the first of those that train")
        notes.put("master_port", int(port), f"{name} cluster, the first of those that train")


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        where = text[max(0, error.pos - 15) : error.pos + 15]
        refuse(name, f"this is not JSON: {error.msg} at character {error.pos}", where)
    except RecursionError:
        refuse(name, "this is no cluster: its brackets are nested too deeply", text[:30])
    if not isinstance(spec, dict):
        refuse(name, "write a JSON object", spec)
    if "sparseCluster" in spec:  # Kubeflow's, of a job whose workers come and go
        advice = "it leaves other workers out: turn enableDynamicWorker off, and cluster names all"
        refuse(f"{name} sparseCluster", advice, spec["sparseCluster"])
    return spec


def _tasks(name: str, cluster: object) -> dict[str, list[str]]:
    """Return the addresses of each task; a pool that was left empty is none."""
    if cluster is None:
        return {}
    if not isinstance(cluster, dict):
        refuse(f"{name} cluster", "write an object of lists of host:port", cluster)
    seen: set[str] = set()
    for task, addresses in cluster.items():
        if not isinstance(addresses, list):
            refuse(f"{name} cluster.{task}", "write a list of host:port", addresses)
        for address in addresses:
            if not isinstance(address, str) or not _is_address(address):
                refuse(f"{name} cluster.{task}", "write host:port", address)
            if address in seen:
                refuse(f"{name} cluster.{task}", "an address appears twice", address)
            seen.add(address)
    return {task: addresses for task, addresses in cluster.items() if addresses}


def _task(name: str, task: object) -> tuple[str, int, str | None]:
    if task is None:
        task = {}
    if not isinstance(task, dict):
        refuse(f"{name} task", "write an object with type and index", task)
    kind, index, trial = task.get("type", ""), task.get("index", 0), task.get("trial")
    if not isinstance(kind, str):
        refuse(f"{name} task.type", "write a string", kind)
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)  # as TensorFlow takes it
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        refuse(f"{name} task.index", "write an integer from 0 on", index)
    return kind, index, None if trial in {None, ""} else str(trial)


def _is_address(address: str) -> bool:
    port = address.rpartition(":")[2]
    return ":" in address and host_of(address) is not None and 0 < int(port) < 65536


def _host(address: str) -> str:
    return address.rpartition(":")[0]
