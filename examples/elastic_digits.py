"""Classify handwritten digits with PyTorch, while ranks leave and join.

    export REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 WORLD_SIZE=2 python examples/elastic_digits.py        (and RANK=1)
    REDUCTION_JOIN=1 python examples/elastic_digits.py           (at any time: one more rank)

Kill any rank, and the others go on. At the end all print the same fingerprint of their weights.
"""

import argparse
import hashlib
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from worker_client import elastic

BATCH = 120  # of all ranks together

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
options = parser.parse_args()

client = worker_client.init(on_rank_lost="continue")
# A process group cannot grow, so each rank has one of its own, for DDP alone.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
model = DistributedDataParallel(layers, find_unused_parameters=True)
worker_client.attach(model, client)
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

step = 0
while step < options.steps:
    # Ranks that wait get in here; all then go on from the step of the lowest one.
    state = elastic.sync(layers, optimizer, step=step)
    step = step if state is None else state["step"]
    present = client.present
    batch = np.random.default_rng(step).permutation(len(targets))[:BATCH]
    mine = torch.from_numpy(batch[present.index(client.rank) :: len(present)].copy())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
    step += 1
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}, ranks {present}", flush=True)
    time.sleep(options.pause)

fingerprint = hashlib.sha256()
for parameter in layers.parameters():
    fingerprint.update(parameter.detach().numpy().data)
print(f"rank {client.rank} ends with weights {fingerprint.hexdigest()[:16]}", flush=True)
client.shutdown()
dist.destroy_process_group()
