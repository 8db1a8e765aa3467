"""Train on handwritten digits with FSDP: sharded within a node, averaged across nodes.

Run it with ``torchrun --nproc-per-node 4 examples/fsdp_digits.py``: two shards, each at two ranks.
With ``--stock`` FSDP averages by itself, over the process group.
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from worker_client import fsdp

STEPS, BATCH, SHARDS = 100, 64, 2

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="all-reduce over the process group")
stock = parser.parse_args().stock

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU()), torch.nn.Linear(128, 10)
)
shards = min(SHARDS, world_size // 2)
mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("nodes", "shards"))
for module in (model[0], model):
    fully_shard(module, mesh=mesh if stock else mesh["shards"])
client = None if stock else fsdp.attach(model, mesh["nodes"])  # the one line

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(STEPS):
    at = torch.arange(BATCH) + (step * world_size + rank) * BATCH
    chosen = at % len(labels)
    loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    loss = torch.nn.functional.cross_entropy(model(images), labels)
weights = torch.cat([weight.full_tensor().flatten() for weight in model.state_dict().values()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
reduced = client.bytes_reduced if client else 0
print(f"rank {rank}: loss {loss:.9f}, weights {digest}, {reduced} bytes reduced")
dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
dist.destroy_process_group()
