"""Classify digits with a Horovod script: only the line that imports Horovod is another.

With --stock, DDP over Gloo averages the gradients, as Horovod does not build for today's PyTorch.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import worker_client
import worker_client.horovod as hvd  # was: import horovod.torch as hvd

stock = "--stock" in sys.argv
if stock:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
else:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=size, rank=rank)
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(rank)  # all ranks take the weights of rank 0
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * size, momentum=0.9)
model: torch.nn.Module = net
if stock:
    model = DistributedDataParallel(net)
else:
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()

with torch.no_grad():
    loss = float(cross_entropy(net(x), y))
    weights = torch.cat([parameter.flatten() for parameter in net.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reduced = 0 if stock else worker_client.init().bytes_reduced
print(f"rank {rank}: loss {loss:.9f}, weights {digest}, {reduced} bytes reduced", flush=True)
if stock:
    dist.destroy_process_group()
else:
    hvd.shutdown()
