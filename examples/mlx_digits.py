"""Classify handwritten digits with MLX; reducers average the gradients.

    export WORLD_SIZE=2 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/mlx_digits.py   (and RANK=1)

Any launcher that sets RANK and WORLD_SIZE will do. With --stock HOST:PORT,HOST:PORT, the addresses
of the ranks, MLX's own ring averages them.
"""

import argparse
import hashlib
import json
import os
import tempfile
from functools import partial

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from sklearn.datasets import load_digits

import worker_client
from worker_client.mlx import average_gradients, broadcast

parser = argparse.ArgumentParser()
parser.add_argument("--stock", metavar="HOST:PORT,...", help="where MLX's ranks listen")
stock = parser.parse_args().stock
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

images, labels = load_digits(return_X_y=True)
images, labels = mx.array(images / 16, mx.float32), mx.array(labels)
mx.random.seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))

if stock:
    with tempfile.NamedTemporaryFile("w") as hosts:
        json.dump([[address] for address in stock.split(",")], hosts)
        hosts.flush()
        os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts.name}
        ring = mx.distributed.init(strict=True, backend="ring")
    average = partial(nn.average_gradients, group=ring)
else:
    client = worker_client.init()
    model.update(broadcast(model.parameters()))
    average = average_gradients  # the one line


def loss_of(x: mx.array, y: mx.array) -> mx.array:
    """Return the mean cross-entropy."""
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


optimizer = optimizers.SGD(0.5)
step = nn.value_and_grad(model, loss_of)
order = np.random.default_rng(0)
for _ in range(100):
    mine = mx.array(order.permutation(len(images))[: 64 * world_size][rank::world_size])
    _, gradients = step(images[mine], labels[mine])
    optimizer.update(model, average(gradients))

loss = loss_of(images, labels).item()
weights = b"".join(np.asarray(one).tobytes() for _, one in tree_flatten(model.parameters()))
digest = hashlib.sha256(weights).hexdigest()[:16]
reduced = 0 if stock else client.bytes_reduced
print(f"rank {rank}: loss {loss:.9e}, weights {digest}, {reduced} bytes reduced")
