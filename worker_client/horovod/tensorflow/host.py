"""Calls between ranks on the host, in which TensorFlow's tensors are PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
import torch

from reducer.errors import ConfigError, MismatchError, ReductionError, rebuild
from worker_client.tensorflow import run_on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


# In the order in which they are asked.
_THEIRS: dict[type[ReductionError], type[Exception]] = {
    ConfigError: tf.errors.InvalidArgumentError,
    MismatchError: tf.errors.FailedPreconditionError,
    ReductionError: tf.errors.UnknownError,
}


class Host:
    """Makes calls of this process for TensorFlow, eagerly and out of graphs."""

    def __init__(self) -> None:
        # The latest error of a call; a graph keeps no more of it than its text.
        self.failure: ReductionError | None = None

    def call(
        self,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[Any],
        shapes: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Return what `function` makes of tensors, in one operation, which runs on the host.

        It is given tensors of its own, and returns one of the same dtype for each, whose shapes are
        `shapes`, as far as they are known.

        Raises:
            ConfigError: as `run_on_host`, or a tensor holds strings.
            ReductionError: the call's. Where TensorFlow runs eagerly it is also the one of
                `tf.errors` that Horovod raises: InvalidArgumentError for an argument,
                FailedPreconditionError if ranks disagree, UnknownError else. Out of a graph it is
                an UnknownError, whose message holds the error's name and text.
        """

        def on_host(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            try:
                return [_to_numpy(one) for one in function([_to_torch(one) for one in arrays])]
            except ReductionError as error:
                self.failure = error
                raise _also_theirs(error) from error

        return run_on_host(on_host, [tf.convert_to_tensor(one) for one in tensors], shapes)


def _also_theirs(error: ReductionError) -> ReductionError:
    """Return the same error as a class that is also one of `tf.errors`."""
    ours = type(error)
    theirs = next(theirs for kind, theirs in _THEIRS.items() if isinstance(error, kind))

    def initialize(self: Any, node_def: Any, op: Any, message: str, *_: Any) -> None:
        theirs.__init__(self, node_def, op, message)  # Keras makes them anew, with a longer text
        self.args = (message,)
        vars(self).update(vars(error))

    def reduced(self: ReductionError) -> tuple[Any, ...]:
        return rebuild, (ours, self.args, vars(error))  # the class has no place of its own

    both: Any = type(ours.__name__, (ours, theirs), {"__init__": initialize, "__reduce__": reduced})
    made: ReductionError = both(None, None, str(error))
    return made


def _to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Return a copy, as TensorFlow's memory is not to be written to.

    Raises:
        ConfigError: PyTorch has no such dtype.
    """
    copy = np.array(array, order="C")
    if copy.dtype == tf.bfloat16.as_numpy_dtype:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(copy)
    except TypeError:
        raise ConfigError(
            f"a tensor of {copy.dtype} cannot be sent to other ranks: use numbers, or "
            "hvd.broadcast_object for others"
        ) from None


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


HOST = Host()
