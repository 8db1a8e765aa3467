"""One rank of the FSDP tests, as a module of its own, with torchrun's environment."""

import time

import pytest
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
from reducer.errors import ReductionError, ReductionTimeout
from tests.integration.cases import of_all, run_cases
from tests.ranks import refusal
from worker_client import fsdp


def wrap(strategy=ShardingStrategy.NO_SHARD):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return FullyShardedDataParallel(
        layers, sharding_strategy=strategy, device_id=torch.device("cpu")
    )


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


def case_no_shard_trains_like_ddp(mesh):
    del mesh
    attached = wrap()
    client = fsdp.attach(attached)
    ours = losses(attached)
    assert of_all(ours) == [ours] * 2
    assert ours == pytest.approx(losses(wrap()), rel=1e-5)
    assert client.bytes_reduced > 0


def one_weight(mesh, dtype=torch.float32):
    model = torch.nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def case_reduce_dtype_is_what_travels(mesh):
    model = one_weight(mesh["shard"], torch.bfloat16)
    client = fsdp.attach(model, mesh["replicate"])
    before = client.bytes_reduced
    model(torch.full((1, 1), 2.0 if dist.get_rank() else 256.0)).sum().backward()
    assert float(model.weight.grad.full_tensor()) == 129.0
    assert client.bytes_reduced - before == 2


def case_attach_refuses_and_names_the_fix(mesh):
    twice = wrap()
    fsdp.attach(twice)
    everybody = mesh["replicate"].get_group()
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with worker_client.client.bootstrap.connect(
        rank=0, world_size=1, job=f"alone-{dist.get_rank()}"
    ) as alone:
        replicate = mesh["replicate"]
        for fix, model, given in (
            ("fully_shard(model, mesh=mesh['shard'])", torch.nn.Linear(2, 2), [replicate]),
            ("attach(model, mesh['replicate'])", one_weight(mesh["shard"]), []),
            ("with one dimension of it", one_weight(mesh), [replicate]),
            ("pass the other dimension", one_weight(whole["shard"]), [everybody]),
            ("or NO_SHARD", wrap(ShardingStrategy.FULL_SHARD), []),
            ("once", twice, []),
            ("rank 0 of 1", one_weight(mesh["shard"]), [replicate, alone]),
        ):
            assert fix in refusal(fsdp.attach, model, *given)


def case_an_error_is_raised_by_backward(mesh):
    model = one_weight(mesh["shard"])
    client = fsdp.attach(model, mesh["replicate"])
    client.timeout_s = 0.5
    loss = model(torch.ones(1, 1)).sum()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    with pytest.raises(ReductionError) as raised:
        loss.backward()
    if dist.get_rank() == 0:
        assert isinstance(raised.value, ReductionTimeout)
        assert raised.value.missing == (1,)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    run_cases(globals(), mesh, stop=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
