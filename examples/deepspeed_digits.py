"""Train with DeepSpeed over the backend of reducers."""

import argparse
import hashlib

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from worker_client.torch_backend import bytes_reduced  # makes the backend known, too

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--stock", action="store_true", help="train over Gloo")
arguments.add_argument("--zero", type=int, default=0, help="ZeRO stage")
options = arguments.parse_args()

deepspeed.init_distributed("gloo" if options.stock else "reduction")  # the one line
rank, world_size = dist.get_rank(), dist.get_world_size()

data, target = load_digits(return_X_y=True)
images = torch.tensor(data / 16, dtype=torch.float32)
labels = torch.tensor(target)

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
engine, _, _, _ = deepspeed.initialize(
    model=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
    config={
        "train_micro_batch_size_per_gpu": 64 // world_size,
        "zero_optimization": {"stage": options.zero},
        "zero_allow_untested_optimizer": True,
    },
)
for epoch in range(3):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch in order[: len(order) // 64 * 64].split(64):
        mine = batch[rank::world_size]
        engine.backward(nn.functional.cross_entropy(engine(images[mine]), labels[mine]))
        engine.step()

with torch.no_grad():
    loss = nn.functional.cross_entropy(engine(images), labels)
with deepspeed.zero.GatheredParameters(list(network.parameters())):
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(f"rank {rank}: loss {loss:.9g}, weights {digest}, {bytes_reduced()} bytes reduced")
dist.barrier()  # a rank that hosts a reducer leaves when all have their last result
dist.destroy_process_group()
