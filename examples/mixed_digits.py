"""Classify handwritten digits in one job whose ranks use PyTorch, JAX, MLX and NumPy.

    export WORLD_SIZE=4 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/mixed_digits.py torch   (RANK=1 with jax, RANK=2 with mlx, and so on)

Any launcher that sets RANK and WORLD_SIZE will do; without a name, ranks take the frameworks in
turn. Each rank ends with a fingerprint of all results of its all-reduces, the same at all ranks.
With --stock every rank trains by itself in NumPy, on the batches of all ranks.
"""

import argparse
import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import worker_client

# What a framework is here: how it takes an array, gradients of the mean cross-entropy by a list of
# weights, and their mean over all ranks. Each gives all gradients in one order, as one buffer.
Framework = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def with_torch() -> Framework:
    """Return what PyTorch does."""
    import torch

    def gradients_of(weights: list, x: torch.Tensor, y: torch.Tensor) -> list:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        logits = torch.tanh(x @ leaves[0]) @ leaves[1]
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), leaves)

    def average(gradients: list) -> list:
        buffer = torch.cat([one.flatten() for one in gradients])
        client.all_reduce(buffer).wait()
        parts = buffer.split([one.numel() for one in gradients])
        return [part.view_as(one) for part, one in zip(parts, gradients, strict=True)]

    return torch.tensor, gradients_of, average


def with_jax() -> Framework:
    """Return what JAX does."""
    import jax
    import jax.numpy as jnp

    from worker_client.jax import all_reduce

    def loss_of(weights: list, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jnp.tanh(x @ weights[0]) @ weights[1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()

    return jnp.asarray, jax.jit(jax.grad(loss_of)), all_reduce


def with_mlx() -> Framework:
    """Return what MLX does."""
    import mlx.core as mx
    from mlx import nn

    from worker_client.mlx import all_reduce

    def loss_of(weights: list, x: mx.array, y: mx.array) -> mx.array:
        logits = mx.tanh(x @ weights[0]) @ weights[1]
        return nn.losses.cross_entropy(logits, y, reduction="mean")

    return mx.array, mx.grad(loss_of), all_reduce


def with_numpy() -> Framework:
    """Return what NumPy does."""

    def gradients_of(weights: list, x: np.ndarray, y: np.ndarray) -> list:
        hidden = np.tanh(x @ weights[0])
        raised = np.exp(hidden @ weights[1])
        of_logits = (raised / raised.sum(1, keepdims=True) - np.eye(10, dtype="f4")[y]) / len(y)
        of_hidden = (of_logits @ weights[1].T) * (1 - hidden * hidden)
        return [x.T @ of_hidden, hidden.T @ of_logits]

    def average(gradients: list) -> list:
        buffer = np.concatenate([one.ravel() for one in gradients])
        client.all_reduce(buffer).wait()
        parts = np.split(buffer, [gradients[0].size])
        return [part.reshape(one.shape) for part, one in zip(parts, gradients, strict=True)]

    return np.asarray, gradients_of, average


FRAMEWORKS = {"torch": with_torch, "jax": with_jax, "mlx": with_mlx, "numpy": with_numpy}

parser = argparse.ArgumentParser()
parser.add_argument("framework", nargs="?", choices=FRAMEWORKS, help="what this rank uses")
parser.add_argument("--steps", type=int, default=100, help="steps of gradient descent")
parser.add_argument("--stock", action="store_true", help="train without reducers")
chosen = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
name = "numpy" if chosen.stock else chosen.framework or list(FRAMEWORKS)[rank % len(FRAMEWORKS)]
own, gradients_of, average = FRAMEWORKS[name]()
if not chosen.stock:
    client = worker_client.init()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
chance = np.random.default_rng(0)  # the same numbers at every rank
shapes = ((64, 32), (32, 10))
weights = [own(chance.standard_normal(shape, np.float32) / 8) for shape in shapes]
sums = hashlib.sha256()
for step in range(chosen.steps):
    batch = chance.permutation(len(images))[: 64 * world_size]
    mine = batch if chosen.stock else batch[rank::world_size]
    gradients = gradients_of(weights, own(images[mine]), own(labels[mine]))
    if not chosen.stock:
        gradients = average(gradients)
    for one in gradients:
        sums.update(np.asarray(one).tobytes())
    # Half of it is exact in every framework, so that weights stay the same to the bit as well.
    weights = [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]
    if step == 0:
        print(f"rank {rank} trains with {name}", flush=True)

weights = [np.asarray(one) for one in weights]
logits = np.tanh(images @ weights[0]) @ weights[1]
loss = (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]).mean()
digest = hashlib.sha256(b"".join(one.tobytes() for one in weights)).hexdigest()[:16]
reduced = 0 if chosen.stock else client.bytes_reduced
print(f"rank {rank}: loss {loss:.9e}, weights {digest}, {reduced} bytes reduced")
print(f"rank {rank}: sums {sums.hexdigest()[:16]}")
