"""Classify digits with an elastic Horovod script, whose ranks may die and join.

    export REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT REDUCTION_ON_RANK_LOST=continue
    RANK=0 WORLD_SIZE=2 python examples/horovod_elastic_digits.py    (and RANK=1)
    REDUCTION_JOIN=1 python examples/horovod_elastic_digits.py       (at any time: one more rank)

Only the line that imports Horovod is another. At the end all print the same weights.
"""

import argparse
import hashlib
import time

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import worker_client.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
options = parser.parse_args()
RATE = 0.02  # for one rank

hvd.init()
digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
data = TensorDataset(x, y)
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(hvd.rank())  # all ranks take the weights of rank 0
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=RATE * hvd.size(), momentum=0.9),
    named_parameters=net.named_parameters(),
)


def scale_rate() -> None:
    """Learn faster with more ranks."""
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train from the state's epoch on, and from where that was left."""
    for state.epoch in range(state.epoch, options.epochs):  # noqa: B020 (as Horovod's users do)
        for batch, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            sampler.record_batch(batch, 32)
            state.commit()
            time.sleep(options.pause)
        loss = cross_entropy(net(x), y).item()
        print(f"epoch {state.epoch}: loss {loss:.4f}, {hvd.size()} ranks", flush=True)
        sampler.set_epoch(state.epoch + 1)


state = hvd.elastic.TorchState(net, optimizer, epoch=0, sampler=sampler)
state.register_reset_callbacks([scale_rate])
train(state)
weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(f"rank {hvd.rank()} of {hvd.size()} ends with weights {digest}", flush=True)
hvd.shutdown()
