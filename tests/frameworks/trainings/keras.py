"""Keras's model.fit with BackupAndRestore, beside its steps in MultiWorkerMirroredStrategy.

TensorFlow's strategy for several machines runs the model's ``train_step``: ``fit`` itself asks it
for a mean of batches, which it cannot make.
"""

import json
import os
import sys
from contextlib import nullcontext

import numpy as np
import tensorflow as tf

rank = int(os.environ["RANK"])
strategy = None
if sys.argv[1] == "stock":  # before anything else of TensorFlow
    task = {"type": "worker", "index": rank}
    cluster = {"worker": os.environ["STOCK_HOSTS"].split(",")}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

import keras  # noqa: E402

import worker_client  # noqa: E402
from tests.frameworks.resumption import MIDDLE, Trained, main  # noqa: E402
from worker_client.keras import (  # noqa: E402
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
)

x = np.random.default_rng(rank).standard_normal((MIDDLE, 8, 8), np.float32)  # an epoch's batches
y = x.sum(axis=2, keepdims=True)


class Losses(keras.callbacks.Callback):
    """Keeps this rank's loss of each batch; a strategy's metrics are means over all ranks."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        del logs
        self.losses.append(float(keras.ops.mean(keras.ops.square(self.model(x[batch]) - y[batch]))))


def train_keras(part):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else nullcontext():
        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 1, 0.9)
        optimizer = keras.optimizers.AdamW(rate)
        if not part.stock:
            optimizer = DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", jit_compile=False)
    losses = Losses()
    if strategy:
        losses.set_model(model)
        step = tf.function(lambda *batch: strategy.run(model.train_step, (batch,)))
        for at in part.steps:
            losses.on_train_batch_begin(at % MIDDLE)
            step(x[at % MIDDLE], y[at % MIDDLE])
        return Trained(losses.losses, 0)
    backup = keras.callbacks.BackupAndRestore(f"{part.folder}/{rank}", delete_checkpoint=False)
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).repeat(),
        epochs=part.steps.stop // MIDDLE,
        steps_per_epoch=MIDDLE,
        callbacks=[losses, backup, BroadcastGlobalVariablesCallback()],
        verbose=0,
    )
    return Trained(losses.losses, worker_client.init().bytes_reduced)


if __name__ == "__main__":
    main(globals())
