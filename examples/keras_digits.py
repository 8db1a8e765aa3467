"""Classify handwritten digits with Keras's model.fit; reducers average the gradients.

    export WORLD_SIZE=2 REDUCTION_JOB=digits REDUCTION_SERVERS=HOST:PORT
    RANK=0 python examples/keras_digits.py   (and RANK=1)

Any launcher that sets RANK and WORLD_SIZE will do. With --stock every rank trains by itself, on the
batches of all ranks: Keras 3 has no strategy for several machines that model.fit could use.
"""

import argparse
import hashlib
import os

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import worker_client
from worker_client.keras import (
    BroadcastGlobalVariablesCallback,
    DistributedOptimizer,
    MetricAverageCallback,
)

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train without reducers")
stock = parser.parse_args().stock
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

digits = load_digits()
images, labels = digits.images.reshape(-1, 64).astype(np.float32) / 16, digits.target
steps = len(labels) // (64 * world_size)  # as many at every rank
order = np.random.default_rng(0).permutation(len(labels))
data = tf.data.Dataset.from_tensor_slices((images[order], labels[order]))
if stock:
    data = data.batch(64 * world_size, drop_remainder=True)
else:
    data = data.shard(world_size, rank).batch(64, drop_remainder=True)

keras.utils.set_random_seed(0)
layers = [keras.Input((64,)), keras.layers.Dense(32, "gelu"), keras.layers.Dense(10)]
model = keras.Sequential(layers)
optimizer = keras.optimizers.SGD(0.3, momentum=0.5)
callbacks = []
if not stock:
    client = worker_client.init()
    optimizer = DistributedOptimizer(optimizer)  # the one line
    callbacks = [BroadcastGlobalVariablesCallback(), MetricAverageCallback()]
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss_of, metrics=["accuracy"], jit_compile=False)
model.fit(data.repeat(), epochs=8, steps_per_epoch=steps, callbacks=callbacks, verbose=0)

loss = float(loss_of(labels, model(images)))
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
reduced = 0 if stock else client.bytes_reduced
print(f"rank {rank}: loss {loss:.9e}, weights {digest[:16]}, {reduced} bytes reduced")
