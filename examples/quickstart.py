"""Fit a linear model with DDP; reducers average its gradients."""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_client

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1), bucket_cap_mb=64)
client = worker_client.attach(model)  # the one line

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())  # every rank has data of its own
for _ in range(100):
    x = torch.randn(32, 10)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reducers = len(client.spec.reducers)
said = f"rank {client.rank}: loss {loss:.1e}, weights {digest}, {reducers} reducers\n"
print(said, end="", flush=True)  # in one piece: all ranks write to one terminal
dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
dist.destroy_process_group()
