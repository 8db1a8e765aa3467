"""What workers' containers train: steps until a file appears, or as many as are asked for."""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else None
STOP = Path("/signals/stop")

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=64)
client = worker_client.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank + 1)  # every rank has data of its own

steps = 0
while True:
    # Rank 0 sees the file, and all stop after the same step.
    done = torch.tensor([STOP.exists() if STEPS is None else steps >= STEPS])
    dist.broadcast(done, 0)
    if done.item():
        break
    x = torch.randn(32, 256)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
    if steps == 20:
        print("trained 20 steps", flush=True)

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
lost = client.counters.losses
print(f"rank {rank} of {world_size} on {os.uname().nodename}: {steps} steps, {digest}, {lost} lost")
dist.barrier()
dist.destroy_process_group()
