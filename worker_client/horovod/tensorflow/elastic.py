"""``hvd.elastic`` for TensorFlow: what a training keeps while ranks come and go."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from reducer.errors import ConfigError
from worker_client.horovod.common import elastic as common
from worker_client.horovod.common.elastic import ObjectState, State
from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.tensorflow.functions import broadcast_variables
from worker_client.horovod.tensorflow.host import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    T = TypeVar("T")

__all__ = ["TensorFlowKerasState", "TensorFlowState"]
__all__ += ["HostsUpdatedInterrupt", "ObjectState", "State", "run"]


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Let a function train while ranks leave and join.

    As of `worker_client.horovod.torch.elastic.run`; what a call inside a `tf.function` fails with
    counts as well, which TensorFlow raises as an error of its own.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> T:
        HOST.failure = None
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            if HOST.failure is None or str(HOST.failure) not in str(error):
                raise
            raise HOST.failure from error

    return common.run(translated)


class TensorFlowState(ObjectState):
    """The state of a training, whose parts are its attributes.

    The `variables`, `tf.Variable` or `keras.Variable`, are kept, restored and sent, and so are
    further parts, of types that ``hvd.broadcast_object`` takes; `session` changes nothing.
    """

    def __init__(
        self,
        variables: Iterable[Any],
        session: None = None,  # noqa: ARG002 (of TensorFlow 1)
        **kwargs: Any,
    ) -> None:
        self.variables = list(variables)
        super().__init__(**kwargs)

    def restore(self) -> None:
        for variable, value in zip(self._listed(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._listed(), 0)
        super().sync()

    def _listed(self) -> list[Any]:
        return self.variables

    def _keep(self) -> None:
        super()._keep()
        self._values = [tf.identity(tf.convert_to_tensor(one)) for one in self._listed()]


class TensorFlowKerasState(TensorFlowState):
    """The state of a training with Keras, whose parts are its attributes.

    The variables of the `model`, which is built, and of the `optimizer`, by default the compiled
    model's own, are kept, restored and sent, and so are further parts, of types that
    ``hvd.broadcast_object`` takes; `backend` changes nothing.

    Raises:
        ConfigError: the model has no variables yet, or no optimizer.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: None = None,  # noqa: ARG002 (of TensorFlow 1)
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ConfigError("the model has no weights yet: call model.build(input_shape) first")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is None:
            raise ConfigError("the model has no optimizer: compile it first, or pass optimizer=")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__((), **kwargs)

    def _listed(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]
