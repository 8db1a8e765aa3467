"""From an environment to who this process is; which launcher goes before which is decided here."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

from reducer.errors import ConfigError
from reducer.wire.constants import PORT
from worker_client.launch import clusters, kubeflow, processes, slurm
from worker_client.launch.findings import Notes
from worker_client.launch.resolved import Launcher, LauncherRole, Resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worker_client.launch.clusters import Cluster


class _Rule(NamedTuple):
    launcher: Launcher
    present: Callable[[Mapping[str, str]], bool]
    read: Callable[[Notes], None]


def _is_rank(environment: Mapping[str, str]) -> bool:
    return processes.is_env(environment) and bool(environment.get("LOCAL_RANK"))


# The first one that is there says who this process is: who started last knows best. torchrun may
# run under any other; env:// without LOCAL_RANK may mean nodes; mpirun runs in jobs of SLURM, whose
# variables are then those of its daemons.
_ROWS = (
    _Rule(Launcher.TORCHRUN, processes.is_torchrun, processes.env),
    _Rule(Launcher.ENV, _is_rank, processes.env),
    _Rule(Launcher.KUBEFLOW, kubeflow.is_pod, kubeflow.pod),
    _Rule(Launcher.ENV, processes.is_env, processes.env),
    _Rule(Launcher.AZURE_ML, processes.is_azure_mpi, processes.open_mpi),
    _Rule(Launcher.OPEN_MPI, processes.is_open_mpi, processes.open_mpi),
    _Rule(Launcher.MPICH, processes.is_mpich, processes.mpich),
    _Rule(Launcher.SLURM, slurm.is_task, slurm.task),
)


def resolve(environment: Mapping[str, str]) -> Resolved:
    """Find out who a process is.

    Explicit ``REDUCTION_`` settings go before all; then torchrun, env://, Kubeflow, Azure ML, Open
    MPI, MPICH, SLURM, CLUSTER_SPEC, TF_CONFIG. The role is what CLUSTER_SPEC or TF_CONFIG says, and
    so are the reducers.

    Raises:
        ConfigError: it is malformed or contradicts itself; the message quotes the offending part.
    """
    notes = Notes(environment)
    name, cluster = _cluster(environment)
    there = list(dict.fromkeys(row.launcher for row in _ROWS if row.present(environment)))
    if Launcher.AZURE_ML in there:
        there.remove(Launcher.OPEN_MPI)  # it is Azure ML's own
    launcher = there[0] if there else Launcher.NONE
    if cluster is not None:
        there.append(cluster.launcher)
        if launcher is Launcher.NONE or cluster.role is not LauncherRole.WORKER:
            launcher = cluster.launcher
        notes.put("role", cluster.role, cluster.where)
        notes.put("trial", cluster.trial, name)
    if cluster is not None and launcher is cluster.launcher:
        clusters.node(notes, name, cluster)
        notes.put("launcher", launcher, name)
    else:
        # Without a launcher, what it might say of the machine is still read.
        row = next((row for row in _ROWS if row.present(environment)), None)
        (processes.env if row is None else row.read)(notes)
        notes.put("launcher", launcher, notes.reasons.get("rank", ""))
    notes.check()
    nodes = len(cluster.workers) if cluster else 0
    if launcher is Launcher.ENV and cluster is not None:
        _compare(notes, name, cluster)
    if launcher is Launcher.NONE or (cluster and launcher is cluster.launcher and nodes < 2):
        processes.others(notes)
    _name(notes, name, cluster)
    _count_restarts(notes)
    _find_reducers(notes, name, cluster)
    notes.values["also"] = tuple(other for other in there if other is not launcher)
    return Resolved(**notes.values, reasons=notes.reasons)


def _cluster(environment: Mapping[str, str]) -> tuple[str, Cluster | None]:
    for name in ("CLUSTER_SPEC", "TF_CONFIG"):
        if text := environment.get(name, "").strip():
            return name, clusters.read(name, text)
    return "", None


def _compare(notes: Notes, name: str, cluster: Cluster) -> None:
    """Compare RANK and WORLD_SIZE with the replica's place in a cluster, if both count nodes."""
    said = notes.values
    if said.get("local_world_size", 1) > 1 or "local_rank" in said or not cluster.workers:
        return  # they count processes
    numbers, nodes = (said["rank"], said["world_size"]), len(cluster.workers)
    if numbers != (cluster.node_rank, nodes):
        raise ConfigError(
            f"RANK={numbers[0]} and WORLD_SIZE={numbers[1]} contradict {cluster.where}, which is "
            f"number {cluster.node_rank} of {nodes} that train: correct them, or unset both and "
            f"leave it to {name}"
        )


def _name(notes: Notes, cluster_name: str, cluster: Cluster | None) -> None:
    """Find a name for the job that its processes share, and other jobs do not have."""
    environment = notes.environment
    if name := notes.get("REDUCTION_JOB"):
        notes.put("job", name, "REDUCTION_JOB")
    if (run := notes.get("TORCHELASTIC_RUN_ID")) and run != "none":
        notes.put("job", run, "TORCHELASTIC_RUN_ID")
    if run := notes.get("AZUREML_RUN_ID"):
        notes.put("job", run, "AZUREML_RUN_ID")
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if processes.is_open_mpi(environment) and (number := notes.get(name)):
            notes.put("job", f"mpi-{number}", name)
    if slurm.is_task(environment):
        notes.put("job", slurm.job(environment), "SLURM_JOB_ID")
    # Vertex AI, AI Platform and Kubernetes name hosts for one job. Who writes a TF_CONFIG may write
    # the same one, of hosts that have names anyway, for several runs.
    platform = cluster_name == "CLUSTER_SPEC" or "KUBERNETES_SERVICE_HOST" in environment
    if platform and cluster is not None and cluster.workers and _is_of_job(cluster.workers[0]):
        trial = f"-trial-{cluster.trial}" if cluster.trial else ""
        notes.put("job", cluster.workers[0].rpartition(":")[0] + trial, "the first that trains")


def _is_of_job(address: str) -> bool:
    """Whether a host may have its name from a platform: no address, nor what all hosts have."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip_address(host)
    except ValueError:
        return host.partition(".")[0].lower() != "localhost"
    return False


def _count_restarts(notes: Notes) -> None:
    most = (1 << 32) - 1
    notes.number("restarts", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", most=most)
    if (given := notes.get("REDUCTION_GENERATION")).isdecimal():  # else the settings refuse it
        notes.put("generation", int(given), "REDUCTION_GENERATION")
    if "restarts" in notes.values:
        notes.put("generation", notes.values["restarts"], notes.reasons["restarts"])


def _find_reducers(notes: Notes, name: str, cluster: Cluster | None) -> None:
    if "REDUCTION_SERVERS" in notes.environment:
        said = notes.get("REDUCTION_SERVERS").split(",")
        reducers = tuple(address.strip() for address in said if address.strip())
        notes.put("reducers", reducers, "REDUCTION_SERVERS")
    elif cluster is not None and cluster.reducers:
        port = notes.get("REDUCTION_BIND").rpartition(":")[2]
        # The one in the JSON is TensorFlow's.
        port = port if port.isdecimal() and int(port) else str(PORT)
        reducers = tuple(f"{host}:{port}" for host in cluster.reducers)
        notes.put("reducers", reducers, f"{name} cluster, at port {port}")
