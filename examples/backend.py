"""Train with DDP where all that is changed is the process group's backend."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worker_client.torch_backend import bytes_reduced  # makes the backend known, too

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stock", action="store_true", help="train over Gloo")
options = arguments.parse_args()

dist.init_process_group("gloo" if options.stock else "reduction")  # the one line
rank, world_size = dist.get_rank(), dist.get_world_size()

data, target = load_digits(return_X_y=True)
images = torch.tensor(data / 16, dtype=torch.float32)
labels = torch.tensor(target)

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order[: len(order) // 64 * 64].split(64):
        mine = batch[rank::world_size]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()

with torch.no_grad():
    loss = nn.functional.cross_entropy(network(images), labels)
weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(f"rank {rank}: loss {loss:.9g}, weights {digest}, {bytes_reduced()} bytes reduced")
dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
dist.destroy_process_group()
