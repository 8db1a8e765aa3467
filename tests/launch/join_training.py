"""Trains on a part of each batch: `python train.py FILE SECONDS WAY`, the seconds of a sample.

The way is by which the mean of all gradients becomes that of the whole batch.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client
from worker_client import ddp

STEPS, SAMPLES, FEATURES = 12, 64, 400


def batch(step):
    """Return the whole batch of a step, the same at every rank."""
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(step))


def network():
    """Return the model as it is at first."""
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, FEATURES)


def trained(model, part, compute, scale=1.0):
    """Train a model on a part of each batch, and return its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        samples = batch(step)[part.start : part.stop]
        compute(len(samples))
        loss = (model(samples) - samples.flip(1)).square().mean() * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def main(file, sample_s, way):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(), bucket_cap_mb=64)
    worker_client.attach(model)
    part = worker_client.batch_part(SAMPLES)
    scale = 1.0
    if way == "weight":
        ddp.state_of(model).weight = len(part)
    else:
        scale = len(part) * dist.get_world_size() / SAMPLES
    weights = trained(model, part, lambda samples: time.sleep(sample_s * samples), scale)
    said = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "REDUCTION_WIRE_DTYPE")}
    shares = os.environ.get("REDUCTION_BATCH_SHARES")
    Path(file).write_text(json.dumps([said, shares, len(part), weights.tolist()]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
