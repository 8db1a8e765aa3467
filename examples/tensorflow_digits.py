"""Classify handwritten digits with TensorFlow and a loop of one's own; reducers average gradients.

    export WORLD_SIZE=2 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/tensorflow_digits.py   (and RANK=1)

Any launcher that sets RANK and WORLD_SIZE will do. With --stock HOST:PORT,HOST:PORT, the addresses
of the ranks, TensorFlow's MultiWorkerMirroredStrategy sums them.
"""

import argparse
import hashlib
import json
import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import worker_client
from worker_client.tensorflow import DistributedGradientTape, broadcast_variables

parser = argparse.ArgumentParser()
parser.add_argument("--stock", metavar="HOST:PORT,...", help="where TensorFlow's workers listen")
stock = parser.parse_args().stock
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if stock:
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": stock.split(",")}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
else:
    client = worker_client.init()
    strategy = tf.distribute.get_strategy()

digits = load_digits()
images, labels = tf.constant(digits.images.reshape(-1, 64) / 16, tf.float32), digits.target
tf.random.set_seed(0)
with strategy.scope():
    weights = [tf.Variable(tf.random.normal(shape) / 8) for shape in ((64, 32), (32, 10))]
if not stock:
    broadcast_variables(weights)


def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy."""
    logits = tf.nn.gelu(x @ weights[0]) @ weights[1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


def step(x: tf.Tensor, y: tf.Tensor) -> None:
    """Make one step of gradient descent."""
    with tf.GradientTape() as tape:
        loss = loss_of(x, y)
    if stock:
        average = tf.distribute.get_replica_context().all_reduce
        gradients = average(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
    else:
        gradients = DistributedGradientTape(tape).gradient(loss, weights)  # the one line
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.5 * gradient)


everywhere = tf.function(lambda x, y: strategy.run(step, (x, y)))
order = np.random.default_rng(0)
for _ in range(100):
    mine = order.permutation(len(labels))[: 64 * world_size][rank::world_size]
    everywhere(tf.gather(images, mine), tf.constant(labels[mine]))

digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()[:16]
reduced = 0 if stock else client.bytes_reduced
print(f"rank {rank}: loss {loss_of(images, labels):.9e}, weights {digest}, {reduced} bytes reduced")
