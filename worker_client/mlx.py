"""MLX: trees of arrays are reduced by the reducers.

All arrays of a tree go through host memory at once. Call these between the gradients and the
optimizer, outside of `mx.compile`, whose functions cannot call the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from reducer.errors import ConfigError
from worker_client._packing import all_reduce_arrays, broadcast_arrays, on_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from worker_client.client.client import Client


def all_reduce(tree: Any, op: str = "mean", *, client: Client | None = None) -> Any:
    """Return the reduction of a tree over all ranks.

    Every rank must call it with trees of the same structure, shapes and dtypes, in the same order
    of calls.

    Args:
        tree: an array, or lists, tuples and dictionaries of them, as `mlx.utils.tree_map` takes.
        op: ``"sum"``, ``"mean"`` (floating types only), ``"min"``, ``"max"`` or ``"product"``.
        client: the one to use; `worker_client.init()`'s by default.

    Returns:
        A tree of the same structure, shapes and dtypes; every rank gets the same bits.

    Raises:
        ConfigError: a dtype cannot be reduced, or not by `op`.
        ReductionError: as `Work.wait`.
    """
    function = on_host(lambda used, arrays: all_reduce_arrays(used, arrays, op), client)
    return _on_host(function, tree)


def average_gradients(gradients: Any, *, client: Client | None = None) -> Any:
    """Return the mean of a tree of gradients over all ranks, as `mlx.nn.average_gradients` does.

    What that takes besides has no place here: gradients are packed anyway, and
    ``REDUCTION_WIRE_DTYPE`` says what they travel as.

    Args:
        gradients: as of `all_reduce`.
        client: the one to use; `worker_client.init()`'s by default.

    Raises:
        ConfigError, ReductionError: as `all_reduce`.
    """
    return all_reduce(gradients, client=client)


def broadcast(tree: Any, root: int = 0, *, client: Client | None = None) -> Any:
    """Return what a tree is at rank `root`, bit for bit: parameters and optimizer state, say.

    Args:
        tree: as of `all_reduce`.
        root: the rank whose tree it is to be.
        client: the one to use; `worker_client.init()`'s by default.

    Raises:
        ConfigError: there is no such rank.
        ReductionError: as `Work.wait`.
    """
    function = on_host(lambda used, arrays: broadcast_arrays(used, arrays, root), client)
    return _on_host(function, tree)


def _on_host(function: Callable[..., Any], tree: Any) -> Any:
    """Give the arrays of all leaves to `function` at once, and return its results as a tree."""
    leaves = [mx.array(leaf) for _, leaf in tree_flatten(tree)]
    mx.eval(leaves)
    results = function(*map(_to_numpy, leaves))
    arrays = iter([_to_mlx(*pair) for pair in zip(results, leaves, strict=True)])
    return tree_map(lambda _: next(arrays), tree)


def _to_numpy(leaf: mx.array) -> NDArray[Any]:
    if leaf.dtype != mx.bfloat16:  # of which the buffer protocol knows nothing
        return np.asarray(leaf)
    try:
        from ml_dtypes import bfloat16  # noqa: PLC0415 (MLX does without it)
    except ImportError:
        raise ConfigError("arrays of bfloat16 need the package ml_dtypes: install it") from None
    return np.asarray(leaf.view(mx.uint16)).view(bfloat16)


def _to_mlx(result: NDArray[Any], leaf: mx.array) -> mx.array:
    if leaf.dtype != mx.bfloat16:
        return mx.array(result, leaf.dtype)  # else float64 would become float32
    return mx.array(result.view(np.uint16)).view(mx.bfloat16)
