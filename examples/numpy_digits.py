"""Classify handwritten digits by softmax regression in NumPy; reducers average the gradients.

    export WORLD_SIZE=2 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/numpy_digits.py   (and RANK=1)

Any launcher that sets RANK and WORLD_SIZE will do. With --stock every rank trains by itself, on the
batches of all ranks.
"""

import argparse
import hashlib
import os

import numpy as np
from sklearn.datasets import load_digits

import worker_client
from worker_client.collectives import broadcast

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train without reducers")
stock = parser.parse_args().stock
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
one_hot = np.eye(10, dtype=np.float32)[labels]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of the classes' probabilities."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


weights = np.random.default_rng(0).standard_normal((64, 10), np.float32) / 8
if not stock:
    client = worker_client.init()
    broadcast(client, weights)

order = np.random.default_rng(0)
for _ in range(100):
    batch = order.permutation(len(images))[: 64 * world_size]
    mine = batch if stock else batch[rank::world_size]
    probabilities = np.exp(log_softmax(images[mine] @ weights))
    gradient = images[mine].T @ (probabilities - one_hot[mine]) / len(mine)
    if not stock:
        client.all_reduce(gradient, op="mean").wait()  # the one line
    weights -= 0.5 * gradient

loss = -(one_hot * log_softmax(images @ weights)).sum(axis=1).mean()
digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
reduced = 0 if stock else client.bytes_reduced
print(f"rank {rank}: loss {loss:.9e}, weights {digest}, {reduced} bytes reduced")
