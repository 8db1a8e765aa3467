"""JAX, beside its own runtime's mean over processes; Orbax writes the checkpoint.

Rank 0 writes and reads it, and broadcasts what was in it.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import worker_client
from tests.frameworks.resumption import Trained, main
from worker_client.jax import broadcast, value_and_grad

State = dict[str, Any]


def loss_of(weights, x):
    outputs = jnp.tanh(x @ weights["hidden"]) @ weights["out"]
    return jnp.square(outputs - x.sum(axis=1, keepdims=True)).mean()


def beginning():
    keys = jax.random.split(jax.random.key(0), 2)
    weights = {
        "hidden": jax.random.normal(keys[0], (8, 16)) / 4,
        "out": jax.random.normal(keys[1], (16, 1)) / 4,
    }
    momenta = jax.tree.map(jnp.zeros_like, weights)
    return {"weights": weights, "momenta": momenta, "rate": jnp.float32(0.1)}


def average(weights, x):
    """Return this process's loss, and gradients that JAX's own runtime has averaged."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    return loss, jax.lax.pmean(gradients, "rank")


def step_with(gradients_of):
    def step(state, x):
        loss, gradients = gradients_of(state["weights"], x)
        momenta = jax.tree.map(lambda old, new: 0.9 * old + new, state["momenta"], gradients)
        weights = jax.tree.map(lambda w, m: w - state["rate"] * m, state["weights"], momenta)
        return {"weights": weights, "momenta": momenta, "rate": 0.9 * state["rate"]}, loss[None]

    return step


def train_jax(part):
    rank = int(os.environ["RANK"])
    if part.stock:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(os.environ["STOCK_HOSTS"].split(",")[0], 2, rank)
        mesh = jax.make_mesh((2,), ("rank",))
        everywhere, of_each = PartitionSpec(), PartitionSpec("rank")
        state = jax.device_put(beginning(), NamedSharding(mesh, everywhere))
        places = {"in_specs": (everywhere, of_each), "out_specs": (everywhere, of_each)}
        step = jax.jit(jax.shard_map(step_with(average), mesh=mesh, check_vma=False, **places))
    else:
        client = worker_client.init()
        state = beginning()
        if part.resumes and rank == 0:
            with ocp.StandardCheckpointer() as checkpointer:
                state = checkpointer.restore(part.folder / "saved", state)
        state = broadcast(state)
        step = jax.jit(step_with(value_and_grad(loss_of)))
    losses = []
    for at in part.steps:
        x = np.random.default_rng((at, rank)).standard_normal((8, 8), np.float32)
        if part.stock:
            x = jax.make_array_from_process_local_data(NamedSharding(mesh, of_each), x)
        state, loss = step(state, x)
        losses.append(float(loss.addressable_shards[0].data[0]))
    if part.begins and rank == 0:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(part.folder / "saved", state)
            checkpointer.wait_until_finished()
    return Trained(losses, 0 if part.stock else client.bytes_reduced)


if __name__ == "__main__":
    main(globals())
