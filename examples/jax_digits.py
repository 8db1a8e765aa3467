"""Classify handwritten digits with JAX; reducers average the gradients.

    export WORLD_SIZE=2 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/jax_digits.py   (and RANK=1)

Any launcher that sets RANK and WORLD_SIZE will do. With --stock HOST:PORT, JAX's own runtime, which
meets there, averages them.
"""

import argparse
import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import worker_client
from worker_client.jax import broadcast, value_and_grad

parser = argparse.ArgumentParser()
parser.add_argument("--stock", metavar="HOST:PORT", help="where JAX's processes meet")
stock = parser.parse_args().stock
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if stock:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(stock, world_size, rank)

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
keys = jax.random.split(jax.random.key(0), 2)
weights = {
    "hidden": jax.random.normal(keys[0], (64, 32)) / 8,
    "out": jax.random.normal(keys[1], (32, 10)) / 6,
}


def loss_of(weights: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    logits = jax.nn.gelu(x @ weights["hidden"]) @ weights["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()


if stock:  # one computation over the batches of all processes
    everywhere = NamedSharding(jax.make_mesh((world_size,), ("rank",)), PartitionSpec())
    of_each = NamedSharding(everywhere.mesh, PartitionSpec("rank"))
    weights = jax.device_put(weights, everywhere)
    grad = jax.value_and_grad(loss_of)
else:
    client = worker_client.init()
    weights = broadcast(weights)
    grad = value_and_grad(loss_of)  # the one line


@jax.jit
def step(weights: dict, x: jax.Array, y: jax.Array) -> dict:
    """Return the weights after one step of gradient descent."""
    _, gradients = grad(weights, x, y)
    return jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, weights, gradients)


order = np.random.default_rng(0)
for _ in range(100):
    mine = order.permutation(len(images))[: 64 * world_size][rank::world_size]
    batch = (images[mine], labels[mine])
    if stock:
        batch = jax.tree.map(
            lambda one: jax.make_array_from_process_local_data(of_each, one), batch
        )
    weights = step(weights, *batch)

weights = jax.tree.map(np.asarray, weights)
loss = float(loss_of(weights, images, labels))
digest = hashlib.sha256(b"".join(one.tobytes() for one in jax.tree.leaves(weights))).hexdigest()[
    :16
]
reduced = 0 if stock else client.bytes_reduced
print(f"rank {rank}: loss {loss:.9e}, weights {digest}, {reduced} bytes reduced")
