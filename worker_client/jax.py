"""JAX: pytrees are reduced by the reducers, also inside `jax.jit`.

All leaves of a tree go through one ordered callback to the host, so that compiled functions make
the same calls in the same order at every rank. Use one process for each device.

An error is a `ReductionError` outside of compiled functions. Out of a compiled one, JAX raises
`jax.errors.JaxRuntimeError` instead, whose message holds the error's name and text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from worker_client._packing import all_reduce_arrays, broadcast_arrays, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.client.client import Client


def all_reduce(tree: Any, op: str = "mean", *, client: Client | None = None) -> Any:
    """Return the reduction of a pytree over all ranks.

    It cannot be differentiated or mapped by `jax.vmap`: reduce what these return. Every rank must
    call it with trees of the same structure, shapes and dtypes, in the same order of calls.

    Args:
        tree: a pytree of arrays or numbers.
        op: ``"sum"``, ``"mean"`` (floating types only), ``"min"``, ``"max"`` or ``"product"``.
        client: the one to use; `worker_client.init()`'s by default.

    Returns:
        A pytree of the same structure, shapes and dtypes; every rank gets the same bits.

    Raises:
        ConfigError: a dtype cannot be reduced, or not by `op`.
        ReductionError: as `Work.wait`, see above.
    """
    function = on_host(lambda used, arrays: all_reduce_arrays(used, arrays, op), client)
    return _on_host(function, tree)


def broadcast(tree: Any, root: int = 0, *, client: Client | None = None) -> Any:
    """Return what a pytree is at rank `root`, bit for bit: parameters and optimizer state, say.

    Args:
        tree: a pytree of arrays or numbers, of the same structure, shapes and dtypes at every rank.
        root: the rank whose tree it is to be.
        client: the one to use; `worker_client.init()`'s by default.

    Raises:
        ConfigError: there is no such rank.
        ReductionError: as `Work.wait`, see above.
    """
    function = on_host(lambda used, arrays: broadcast_arrays(used, arrays, root), client)
    return _on_host(function, tree)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    client: Client | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Return a `jax.value_and_grad` of `function` whose gradients are averaged over all ranks.

    The value, and what belongs to it, stay this rank's own.

    Args:
        function: its first result is a scalar, the loss of this rank's batch.
        argnums: the arguments by which it is differentiated.
        has_aux: whether `function` returns something besides the scalar.
        client: the one to use; `worker_client.init()`'s by default.
    """
    local = jax.value_and_grad(function, argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, all_reduce(gradients, client=client)

    return averaged


def _on_host(function: Callable[..., Any], tree: Any) -> Any:
    """Give the arrays of all leaves to `function` at once, and return its results as a tree."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        results = io_callback(function, shapes, *leaves, ordered=True)
    else:
        jax.effects_barrier()  # what was dispatched before calls the reducers first, at every rank
        results = [
            jax.device_put(array, leaf.sharding)
            for array, leaf in zip(function(*leaves), leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, results)
