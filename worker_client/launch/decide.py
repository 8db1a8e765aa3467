"""What `worker-client launch` runs in a replica."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.units import is_loopback
from reducer.wire.constants import PORT
from worker_client.launch.resolved import Launcher, LauncherRole, Resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class LaunchDecision:
    """What becomes of this process."""

    argv: tuple[str, ...]
    why: str  # for people, one sentence
    sets: Mapping[str, str] = field(default_factory=dict)  # variables that it has in addition


def decide(
    resolved: Resolved,
    environment: Mapping[str, str],
    script: Sequence[str],
    *,
    processes: str,
    devices: Callable[[], int],
) -> LaunchDecision:
    """Decide what to run.

    Args:
        resolved: who this process is.
        environment: its variables.
        script: ``train.py ARGS``, ``-m module ARGS`` or a program.
        processes: how many on this node: a number, or ``auto`` for one per GPU, at least one.
        devices: counts the GPUs; called if need be.

    Raises:
        ConfigError: that cannot be run here; the message says what to change.
    """
    if processes != "auto" and not re.fullmatch(r"[1-9][0-9]{0,4}", processes):
        raise ConfigError(f"--nproc-per-node: write a number or auto (got {processes!r})")
    if not script and resolved.role is not LauncherRole.REDUCER:
        raise ConfigError("nothing to run: write worker-client launch -- train.py ARGUMENTS")
    if resolved.role is LauncherRole.REDUCER:
        return _reduce(environment)
    if resolved.role is LauncherRole.EVALUATOR:
        why = "this replica evaluates: the script runs as it is, outside of the job"
        return LaunchDecision(tuple(_program(script)), why)
    resolved.check_alone()
    sets = {} if "REDUCTION_SERVERS" in environment else {"REDUCTION_SERVERS": resolved.reducers}
    shared = {name: ",".join(value) for name, value in sets.items() if value}
    if resolved.rank is None:
        return _start_ranks(resolved, script, _count(resolved, processes, devices), shared)
    if resolved.local_world_size not in {None, 1} or resolved.launcher is Launcher.TORCHRUN:
        if processes not in {"auto", "1"}:
            raise ConfigError(
                f"{resolved.launcher.value} has started this process as rank {resolved.rank} of "
                f"{resolved.world_size}, and --nproc-per-node {processes} would start as many in "
                "each: leave it out, or start one process on each node"
            )
        return _be_rank(resolved, script, shared)
    # It may be its node's only process, which is to start the others.
    certain = resolved.local_world_size == 1 or resolved.local_rank is None
    count = processes if processes != "auto" or not certain else str(max(1, devices()))
    if count in {"auto", "1"}:
        return _be_rank(resolved, script, shared)
    if resolved.local_rank:
        raise ConfigError(
            f"this process is number {resolved.local_rank} on its node, and --nproc-per-node "
            f"{count} would start as many in each: leave it out, or start one process on each node"
        )
    return _start_ranks(_as_node(resolved), script, count, shared)


def _reduce(environment: Mapping[str, str]) -> LaunchDecision:
    bind = environment.get("REDUCTION_BIND", f"tcp://0.0.0.0:{PORT}")
    try:
        private = is_loopback(bind)
    except ValueError as error:
        raise ConfigError(f"REDUCTION_BIND: {error}") from None
    if not private and not any(
        environment.get(name) for name in ("REDUCTION_INSECURE", "REDUCTION_KEYS")
    ):
        raise ConfigError(
            f"this replica is a reducer, and {bind} can be reached from other machines: set "
            "REDUCTION_KEYS to the directory of its keys, or, if nobody else is in the job's "
            "network, REDUCTION_INSECURE=1"
        )
    argv = (sys.executable, "-m", "reducer", "serve")
    why = "this replica is a reducer, and serves until the job's end, which sends it a SIGTERM"
    return LaunchDecision(argv, why, {"REDUCTION_BIND": bind})


def _be_rank(
    resolved: Resolved, script: Sequence[str], shared: Mapping[str, str]
) -> LaunchDecision:
    """Be the rank that the launcher has started, and tell torch so in its own words."""
    rank, world_size = resolved.rank, resolved.world_size
    if resolved.launcher is Launcher.TORCHRUN:
        why = f"torchrun has started this process as rank {rank} of {world_size}"
        return LaunchDecision(tuple(_program(script)), why, shared)
    address, port = _meeting_point(resolved, world_size or 1)
    told = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": resolved.local_rank or 0,
        "LOCAL_WORLD_SIZE": resolved.local_world_size,
        "NODE_RANK": resolved.node_rank,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    sets = {name: str(value) for name, value in told.items() if value is not None}
    why = f"{resolved.launcher.value} has started this process as rank {rank} of {world_size}"
    return LaunchDecision(tuple(_program(script)), why, {**sets, **shared})


def _start_ranks(
    resolved: Resolved, script: Sequence[str], count: str, shared: Mapping[str, str]
) -> LaunchDecision:
    options = ["--nproc-per-node", count] if count else []
    if resolved.launcher is Launcher.KUBEFLOW:
        why = "torchrun takes the rest from PET_ variables"
    elif (resolved.nodes or 1) == 1:
        options = ["--standalone", "--nnodes", "1", *options]
        why = f"torchrun starts {count} on this node, the only one"
    else:
        nodes, rank = resolved.nodes, resolved.node_rank
        address, port = _meeting_point(resolved, nodes or 1)
        options = ["--nnodes", str(nodes), "--node-rank", str(rank), *options]
        options += ["--master-addr", address, "--master-port", str(port)]
        options += ["--rdzv-id", resolved.job] if resolved.job else []
        why = f"torchrun starts {count} on this node, number {rank} of {nodes}"
    argv = (sys.executable, "-m", "torch.distributed.run", *options)
    return LaunchDecision((*argv, *_for_torchrun(script)), why, shared)


def _count(resolved: Resolved, processes: str, devices: Callable[[], int]) -> str:
    """Return how many ranks a node has; empty if torchrun knows from its own variables."""
    if processes != "auto":
        return processes
    return "" if resolved.processes else str(max(1, devices()))


def _as_node(resolved: Resolved) -> Resolved:
    """Take a rank that is alone on its node for the node."""
    return Resolved(
        launcher=resolved.launcher,
        node_rank=resolved.rank,
        nodes=resolved.world_size,
        master_addr=resolved.master_addr,
        master_port=resolved.master_port,
        job=resolved.job,
    )


def _meeting_point(resolved: Resolved, size: int) -> tuple[str, int]:
    address, port = resolved.master_addr, resolved.master_port
    if address is None and size == 1:
        address = "127.0.0.1"
    if address is None:
        raise ConfigError(
            f"{resolved.launcher.value} does not say where rank 0 is: set MASTER_ADDR to its host "
            "in all processes (mpirun -x MASTER_ADDR=HOST)"
        )
    return address, port or 29500  # torch's own default


def _program(script: Sequence[str]) -> list[str]:
    return [sys.executable, *script] if _is_python(script) else list(script)


def _for_torchrun(script: Sequence[str]) -> list[str]:
    return list(script) if _is_python(script) else ["--no-python", *script]


def _is_python(script: Sequence[str]) -> bool:
    return script[0] == "-m" or script[0].endswith(".py")
