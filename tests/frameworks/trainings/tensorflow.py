"""TensorFlow and a loop of one's own, beside its MultiWorkerMirroredStrategy.

Rank 0 writes and reads the checkpoint, and broadcasts what was in it.
"""

import json
import os

import numpy as np
import tensorflow as tf

import worker_client
from tests.frameworks.resumption import Trained, main
from worker_client.tensorflow import DistributedGradientTape, broadcast_variables


def train_tensorflow(part):
    rank = int(os.environ["RANK"])
    if part.stock:
        task = {"type": "worker", "index": rank}
        cluster = {"worker": os.environ["STOCK_HOSTS"].split(",")}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        client = worker_client.init()
        strategy = tf.distribute.get_strategy()
    tf.random.set_seed(0)
    with strategy.scope():
        weights = [tf.Variable(tf.random.normal(shape) / 4) for shape in ((8, 16), (16, 1))]
        momenta = [tf.Variable(tf.zeros_like(weight)) for weight in weights]
        rate = tf.Variable(0.1)
    checkpoint = tf.train.Checkpoint(weights=weights, momenta=momenta, rate=rate)
    if part.resumes and rank == 0:
        checkpoint.read(str(part.folder / "saved")).assert_consumed()
    if not part.stock:
        broadcast_variables([*weights, *momenta, rate])

    def step(x):
        with tf.GradientTape() as tape:
            outputs = tf.tanh(x @ weights[0]) @ weights[1]
            loss = tf.reduce_mean(tf.square(outputs - tf.reduce_sum(x, axis=1, keepdims=True)))
        if part.stock:
            average = tf.distribute.get_replica_context().all_reduce
            gradients = average(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
        else:
            gradients = DistributedGradientTape(tape).gradient(loss, weights)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(rate * momentum)
        rate.assign(0.9 * rate)
        return loss

    everywhere = tf.function(lambda x: strategy.run(step, (x,)))
    losses = []
    for at in part.steps:
        x = np.random.default_rng((at, rank)).standard_normal((8, 8), np.float32)
        loss = everywhere(tf.constant(x))
        losses.append(float(strategy.experimental_local_results(loss)[0]))
    if part.begins and rank == 0:
        checkpoint.write(str(part.folder / "saved"))
    return Trained(losses, 0 if part.stock else client.bytes_reduced)


if __name__ == "__main__":
    main(globals())
