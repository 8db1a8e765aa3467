"""Classify handwritten digits with torchft's manager, whose replicas may die and come back.

    torchft_lighthouse --min_replicas 2 --bind '[::]:29510' &
    export TORCHFT_LIGHTHOUSE=http://HOST:29510 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    python examples/torchft_digits.py --replica 0        (and --replica 1, ...)

Kill any replica, and the others go on; start it again, and it gets their weights.
"""

import argparse
import hashlib
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torchft import Manager, Optimizer

from worker_client.torchft import DistributedDataParallel, ProcessGroupReduction

BATCH = 60  # of each replica

parser = argparse.ArgumentParser()
parser.add_argument("--replica", type=int, required=True, help="number of this one, from 0")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
options = parser.parse_args()


def load(state: dict) -> None:
    """Take the weights of a replica that is further."""
    layers.load_state_dict(state["layers"])
    optimizer.load_state_dict(state["optimizer"])


def save() -> dict:
    """Return what a replica that begins is given."""
    return {"layers": layers.state_dict(), "optimizer": optimizer.state_dict()}


torch.manual_seed(options.replica)  # all begin with the weights of one
layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupReduction(),
    load_state_dict=load,
    state_dict=save,
    min_replica_size=2,
    replica_id=f"digits-{options.replica}-",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
model = DistributedDataParallel(manager, layers)
optimizer = Optimizer(manager, torch.optim.Adam(layers.parameters(), lr=1e-3))
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
batches = np.random.default_rng(options.replica)

while manager.current_step() < options.steps:
    mine = torch.from_numpy(batches.integers(len(targets), size=BATCH))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
    step, replicas = manager.current_step(), manager.num_participants()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {replicas} replicas", flush=True)
    time.sleep(options.pause)

fingerprint = hashlib.sha256()
for parameter in layers.parameters():
    fingerprint.update(parameter.detach().numpy().data)
print(f"ends with weights {fingerprint.hexdigest()[:16]}", flush=True)
manager.shutdown()
