"""PyTorch FSDP: parameters are sharded inside a node, and the reducers average across nodes.

With `fully_shard` over one dimension of a device mesh, every shard has replicas along another one.
FSDP reduce-scatters gradients among the shards, and gives the output to a hook; the hook averages
it over the replicas through the reducers. Each shard has a job of its own there, whose ranks are
those of its replicas, so what travels is each gradient once per group of shards::

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    worker_client.fsdp.attach(model, mesh["replicate"])

FSDP's hook is synchronous: the backward pass waits for it, module by module. An error is raised by
`loss.backward()`, in the middle of its work, and leaves the model unfit for another step: load a
checkpoint. Gradient accumulation goes by `set_requires_gradient_sync(False)`;
`set_requires_all_reduce` is for FSDP's own all-reduce and has no effect here.

Of `FullyShardedDataParallel`, the older FSDP, only NO_SHARD has a hook that can be used.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor

import worker_client
from reducer.errors import ConfigError
from reducer.wire.constants import ReduceOp
from worker_client.client.bootstrap import connect_subgroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from worker_client.client.client import Client

_HOW = "init_device_mesh(device, (nodes, ranks), mesh_dim_names=('replicate', 'shard'))"


def attach(
    model: torch.nn.Module,
    replicate: DeviceMesh | dist.ProcessGroup | None = None,
    client: Client | None = None,
) -> Client:
    """Let a sharded model's gradients be averaged over its replicas by the reducers.

    All ranks of the default process group call it at the same point, after the last `fully_shard`.

    Args:
        model: the outermost module that `fully_shard` was called with, or one wrapped in
            `FullyShardedDataParallel` with NO_SHARD.
        replicate: the ranks that hold this rank's shard: one dimension of a device mesh, or a
            process group. None for NO_SHARD, where they are those of the model.
        client: of a job that has these ranks; by default one is made, with settings from the
            environment, and for NO_SHARD `init()`'s is used.

    Returns:
        The client in use.

    Raises:
        ConfigError: the model is wrapped in a way that a hook cannot serve, or the ranks do not
            fit; the message says what to change.
        ReductionError: as `worker_client.init`.
    """
    if isinstance(model, FullyShardedDataParallel):
        return _attach_unsharded(model, client)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError(
            f"attach() takes a model that fully_shard() was called with, got "
            f"{type(model).__name__}: call fully_shard(model, mesh=mesh['shard']) first"
        )
    if replicate is None:
        raise ConfigError(
            "a model that is only sharded has no replicas, so that nothing is all-reduced: shard "
            f"over one dimension of mesh = {_HOW}, and call attach(model, mesh['replicate'])"
        )
    group = replicate.get_group() if isinstance(replicate, DeviceMesh) else replicate
    ranks = dist.get_process_group_ranks(group)
    for module in modules:
        _check(module, ranks)
    if client is None:
        client = connect_subgroup(ranks)
        atexit.register(client.shutdown)  # say goodbye, so that nobody waits for us
    _check_ranks(client, group)
    for module in modules:
        module.set_all_reduce_hook(_hook(client))
    return client


def _attach_unsharded(model: FullyShardedDataParallel, client: Client | None) -> Client:
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module.sharding_strategy is not ShardingStrategy.NO_SHARD:
            raise ConfigError(
                f"FullyShardedDataParallel has no hook for replicas with "
                f"{module.sharding_strategy.name}: use fully_shard(model, mesh=mesh['shard']) and "
                f"attach(model, mesh['replicate']), with mesh = {_HOW}; or NO_SHARD"
            )
    used = worker_client.init() if client is None else client
    group: Any = model.process_group
    _check_ranks(used, group)
    average = _hook(used)
    try:
        model.register_comm_hook(None, lambda _, gradient: average(gradient))
    except AssertionError as error:  # torch's own words for a second hook, or an inner module
        raise ConfigError(
            f"call attach() with the outermost module, once, and no other register_comm_hook(): "
            f"{error}"
        ) from None
    return used


def _hook(client: Client) -> Any:
    def average(gradient: torch.Tensor) -> None:
        client.all_reduce(gradient, ReduceOp.MEAN).wait()

    return average


def _check(module: FSDPModule, replicas: Sequence[int]) -> None:
    """Refuse what this hook cannot serve.

    Raises:
        ConfigError: the message says what to change.
    """
    name = type(module).__name__.removeprefix("FSDP")
    for parameter in module.parameters():  # type: ignore[attr-defined]
        if not isinstance(parameter, DTensor):
            continue  # one that fully_shard() was told to ignore
        mesh = parameter.device_mesh
        if mesh.ndim > 1 and parameter.placements[0].is_replicate():
            raise ConfigError(
                f"{name} is sharded over a mesh with replicas, over which FSDP all-reduces by "
                "itself: call fully_shard(model, mesh=mesh['shard']), with one dimension of it, "
                "and attach(model, mesh['replicate'])"
            )
        shards = set(mesh.mesh.flatten().tolist())
        if common := (shards & set(replicas)) - {dist.get_rank()}:
            raise ConfigError(
                f"ranks {sorted(common)} hold other shards of {name}, not replicas of this rank's: "
                "pass the other dimension of the mesh"
            )


def _check_ranks(client: Client, group: dist.ProcessGroup) -> None:
    mine, theirs = (client.rank, client.world_size), (group.rank(), group.size())
    if mine != theirs:
        raise ConfigError(
            f"the replicas' process group has this process as rank {theirs[0]} of {theirs[1]}, the "
            f"client as rank {mine[0]} of {mine[1]}: both must have the same members"
        )
