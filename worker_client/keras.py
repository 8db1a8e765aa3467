"""Keras 3 on TensorFlow: an optimizer that averages gradients over all ranks, and callbacks.

Names are those of Horovod, whose scripts need few changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import worker_client
from reducer.errors import ConfigError
from worker_client.tensorflow import all_reduce, broadcast_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker_client.client.client import Client

_MARK = "_gradients_are_reduced"
_SCALE_OUTSIDE = (
    "a LossScaleOptimizer around the distributed one lets each rank skip steps of its own: write "
    "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: keras.Optimizer, *, op: str = "mean", client: Client | None = None
) -> keras.Optimizer:
    """Let an optimizer reduce gradients over all ranks before it applies them.

    It is the same object afterwards, with its state and its hyperparameters, of a class derived
    from its own; a model that is saved with it loads with the optimizer that it was. It is for
    `model.fit` and for loops of one's own. On a machine with GPUs, call `model.compile` with
    ``jit_compile=False``.

    Args:
        optimizer: any of Keras's. With ``gradient_accumulation_steps`` it reduces in every step.
        op: as of `worker_client.tensorflow.all_reduce`.
        client: the one to use; `worker_client.init()`'s by default.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: Keras runs on another backend than TensorFlow, `optimizer` is none or reduces
            already, or it would come to be inside a `LossScaleOptimizer`.
    """
    check(optimizer)
    worker_client.init() if client is None else client  # what is missing shows before a graph runs
    return reduce_before_apply(optimizer, lambda grads, _: all_reduce(grads, op, client=client))


def check(optimizer: keras.Optimizer) -> None:
    """See whether an optimizer can reduce gradients.

    Raises:
        ConfigError: as `DistributedOptimizer`.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras runs on {keras.backend.backend()}, and DistributedOptimizer on TensorFlow: set "
            "KERAS_BACKEND=tensorflow"
        )
    if not isinstance(optimizer, keras.Optimizer):
        raise ConfigError(
            f"DistributedOptimizer takes an optimizer of Keras, got {type(optimizer).__name__}: "
            "build one, such as keras.optimizers.SGD()"
        )
    if hasattr(optimizer, _MARK):
        raise ConfigError("the optimizer reduces gradients already: wrap it once")
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and (
        keras.config.dtype_policy().name == "mixed_float16"
    ):
        raise ConfigError(_SCALE_OUTSIDE)


def reduce_before_apply(
    optimizer: keras.Optimizer, reduce: Callable[[list[Any], list[Any]], list[Any]]
) -> keras.Optimizer:
    """Let an optimizer apply what `reduce` makes of gradients.

    Args:
        optimizer: one that `check` takes; it becomes one of a class derived from its own.
        reduce: is given gradients and the variables that they are of; in a graph, mostly.

    Returns:
        `optimizer`.
    """
    base = type(optimizer)

    def apply(self: keras.Optimizer, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        of = self._trainable_variables if trainable_variables is None else trainable_variables
        base.apply(self, reduce(list(grads), list(of)), trainable_variables)

    names = {"apply": apply, _MARK: True, "__module__": base.__module__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (base,), names)
    return optimizer


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """When training begins, gives every rank the weights and optimizer state of rank `root`.

    The model must be built by then: weights that the first step makes would not be the root's in
    it. Seeds of random layers are left as they are, so that ranks may drop out different units.

    Args:
        root: the rank whose values they are to be.
        client: the one to use; `worker_client.init()`'s by default.
    """

    def __init__(self, root: int = 0, *, client: Client | None = None) -> None:
        super().__init__()
        self._root = root
        self._client = client

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 (Keras's)
        """Broadcast.

        Raises:
            ConfigError: as `broadcast_variables`; or the model is not built, or the optimizer is
                inside a `LossScaleOptimizer`.
        """
        optimizer = self.model.optimizer
        if hasattr(getattr(optimizer, "inner_optimizer", None), _MARK):
            raise ConfigError(_SCALE_OUTSIDE)
        if not self.model.built:
            raise ConfigError(
                "the model has no weights yet to broadcast: give it a keras.Input, or call "
                "model.build(input_shape) before model.fit()"
            )
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast([*self.model.weights, *optimizer.variables])

    def _broadcast(self, variables: list[Any]) -> None:
        broadcast_variables(variables, self._root, client=self._client)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, replaces metrics by their means over all ranks.

    Callbacks that come after it in the list, and `History`, see the means. Every rank counts the
    same, whatever the number of its samples.

    Args:
        client: the one to use; `worker_client.init()`'s by default.
    """

    def __init__(self, *, client: Client | None = None) -> None:
        super().__init__()
        self._client = client

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average what `logs` holds, in place.

        Raises:
            ReductionError: as `Work.wait`; `MismatchError` if ranks have other numbers of metrics.
        """
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if isinstance(value, float))
        values = np.array([logs[name] for name in names])
        client = worker_client.init() if self._client is None else self._client
        client.all_reduce(values, "mean").wait()
        logs.update(zip(names, values.tolist(), strict=True))
