"""One rank of the FSDP tests, as a module of its own, with torchrun's environment."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import worker_client
from reducer.errors import ReductionError
from tests.ranks import refusal, write_result
from worker_client import fsdp


def wrap(strategy=ShardingStrategy.NO_SHARD):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return FullyShardedDataParallel(
        layers, sharding_strategy=strategy, device_id=torch.device("cpu")
    )


def no_shard():
    def losses(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        found = []
        for _ in range(20):
            x = torch.randn(16, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe = torch.linspace(-1, 1, 8).repeat(4, 1)
            found.append(model(probe).square().mean().item())
        return found

    attached = wrap()
    client = fsdp.attach(attached)
    return {
        "ours": losses(attached),
        "stock": losses(wrap()),
        "bytes_reduced": client.bytes_reduced,
    }


def one_weight(mesh, dtype=torch.float32):
    model = torch.nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def bfloat16(mesh):
    """The mean of 256 and 2, and the bytes that went to reducers."""
    model = one_weight(mesh["shard"], torch.bfloat16)
    client = fsdp.attach(model, mesh["replicate"])
    model(torch.full((1, 1), 2.0 if dist.get_rank() else 256.0)).sum().backward()
    return float(model.weight.grad.full_tensor()), client.bytes_reduced


def late(mesh):
    model = one_weight(mesh["shard"])
    client = fsdp.attach(model, mesh["replicate"])
    client.timeout_s = 0.5
    loss = model(torch.ones(1, 1)).sum()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    try:
        loss.backward()
    except ReductionError as error:
        return f"{type(error).__name__} {getattr(error, 'missing', None)}"
    return "no error"


def refusals(mesh):
    refused = partial(refusal, fsdp.attach)
    twice = wrap()
    fsdp.attach(twice)
    everybody = mesh["replicate"].get_group()
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with worker_client.client.bootstrap.connect(
        rank=0, world_size=1, job=f"alone-{dist.get_rank()}"
    ) as alone:
        return {
            "bare": refused(torch.nn.Linear(2, 2), mesh["replicate"]),
            "sharded": refused(one_weight(mesh["shard"])),
            "replicated": refused(one_weight(mesh), mesh["replicate"]),
            "other_dimension": refused(one_weight(whole["shard"]), everybody),
            "full_shard": refused(wrap(ShardingStrategy.FULL_SHARD)),
            "second": refused(twice),
            "other_client": refused(one_weight(mesh["shard"]), mesh["replicate"], client=alone),
        }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found = {
        "no_shard": no_shard(),
        "bfloat16": bfloat16(mesh),
        "refusals": refusals(mesh),
        "late": late(mesh),
    }
    write_result(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
