"""Models of which two ranks hold parts: FSDP2 and tensor parallel over the backend, and DCP."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.frameworks.resumption import Trained, main
from worker_client.torch_backend import bytes_reduced

WIDTH, BATCH, LENGTH = 8, 4, 6


class Block(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def shard(model, mesh):
    for module in (*model, model):
        fully_shard(module, mesh=mesh)


def train(part, model, seed, reduced=bytes_reduced):
    """Train a model from the part's first step to its last; `seed` is of this rank's batches."""
    before = reduced()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if part.resumes:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=part.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    losses = []
    for step in part.steps:
        generator = torch.Generator().manual_seed(10 * step + seed)
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        loss = (model(x) - x.sum(dim=-1, keepdim=True)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if part.begins:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part.folder)
    dist.barrier()
    return Trained(losses, reduced() - before)


def start(part):
    """Make the process group of torch's default for CPUs, or the backend's, once."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if part.stock else "reduction")


def train_fsdp2(part):
    start(part)
    model = blocks()
    shard(model, init_device_mesh("cpu", (2,)))
    return train(part, model, dist.get_rank())


def train_tensor_parallel(part):
    start(part)
    model = blocks()
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return train(part, model, 0)


if __name__ == "__main__":
    main(globals())
