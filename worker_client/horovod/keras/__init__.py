"""Horovod's Keras interface over reducers, for Keras 3 on TensorFlow.

``import worker_client.horovod.keras as hvd`` and ``import worker_client.horovod.tensorflow.keras as
hvd`` are the same. What calls mean, and what is refused, is in ``docs/horovod.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from reducer.errors import ConfigError
from worker_client.horovod.common import basics
from worker_client.horovod.common.basics import *  # noqa: F403
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet
from worker_client.horovod.keras import callbacks, elastic
from worker_client.horovod.ops import Op, check_passes
from worker_client.horovod.tensorflow import mpi_ops
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.functions import broadcast_global_variables
from worker_client.horovod.tensorflow.gradients import Gradients, local_weights
from worker_client.keras import check, reduce_before_apply

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from worker_client.horovod.torch.compression import Compressor

__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]
__all__ += ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]
__all__ += ["callbacks", "elastic"]
__all__ += basics.__all__


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.Optimizer,
    name: str | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Op.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,  # noqa: ARG001
    groups: Any = None,  # noqa: ARG001
    process_set: ProcessSet = ALL_RANKS,
    scale_local_gradients: bool = True,
) -> keras.Optimizer:
    """Let an optimizer reduce gradients over all ranks before it applies them.

    It is the same object afterwards, of a class derived from its own; a model that is saved with it
    loads with the optimizer that it was. It may be any of Keras's, but must have applied nothing
    yet if there are several passes. Arguments that are not named here are those of
    `worker_client.horovod.DistributedOptimizer`.

    - `name`: of the optimizer, from now on.
    - `device_dense`, `device_sparse`, `num_groups`, `groups`: change nothing; all gradients of a
      call travel together.
    - `sparse_as_dense`: whether `tf.IndexedSlices` travel as dense ones.
    - `backward_passes_per_step`: how many add up before they are applied. They are reduced in each
      pass, and their sum is divided by their number if `average_aggregated_gradients`.
    - `process_set`: others than its ranks apply their own gradients.
    - `scale_local_gradients`: whether gradients of local variables, which
      ``register_local_var(variable)`` of the optimizer makes such, are divided by the number of
      ranks.

    Raises:
        ConfigError: as `worker_client.keras.DistributedOptimizer`; or an argument is wrong, or
            `hvd.init()` was not called.
    """
    passes = check_passes(backward_passes_per_step)
    predivide, scale = gradient_predivide_factor, scale_local_gradients
    gradients = Gradients(compression, sparse_as_dense, op, predivide, process_set, scale)
    if passes > 1 and (optimizer.built or optimizer.gradient_accumulation_steps):
        raise ConfigError(
            "backward_passes_per_step= goes with an optimizer that has no variables yet, and no "
            "gradient_accumulation_steps: wrap it before the model is compiled"
        )

    def reduce(grads: list[Any], variables: list[Any]) -> list[Any]:
        reduced = gradients.reduce(grads, variables)
        if passes == 1 or average_aggregated_gradients:
            return reduced
        return [one if one is None else one * passes for one in reduced]  # Keras takes a mean

    check(optimizer)
    reduce_before_apply(optimizer, reduce)
    if passes > 1:
        optimizer.gradient_accumulation_steps = passes
    if name is not None:
        optimizer.name = name
    optimizer.register_local_var = gradients.keep_local
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.Optimizer, *args: Any, local_layers: Any = None, **kwargs: Any
) -> keras.Optimizer:
    """As `DistributedOptimizer`, but the weights of `local_layers` are this rank's own.

    Raises:
        ConfigError: as `DistributedOptimizer`, or one of these is no layer of Keras.
    """
    weights = local_weights(local_layers)
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for weight in weights:
        wrapped.register_local_var(weight)
    return wrapped


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """Return the reduction of what a tensor can be made of; see `hvd.allreduce` of TensorFlow."""
    scales = prescale_factor, postscale_factor
    return mpi_ops.allreduce(value, average, "", "", compression, op, *scales, name)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values, one after the other along the first dimension."""
    return mpi_ops.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank`."""
    return mpi_ops.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Op.AVERAGE) -> Any:
    """Return this rank's rows of the reduction of what a tensor can be made of."""
    return mpi_ops.reducescatter(value, op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor = Compression.none,
) -> keras.Model:
    """Return a saved model whose optimizer, with its state, is a `DistributedOptimizer`.

    `custom_optimizers` are classes that Keras does not know, `custom_objects` what else it does not
    know, by name; `compression` is that of `DistributedOptimizer`.

    Raises:
        ConfigError: the model was saved without an optimizer.
    """
    named = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(f"{filepath} has no optimizer: compile the model before it is saved")
    DistributedOptimizer(model.optimizer, compression=compression)
    return model
