"""TensorFlow: gradients are averaged by the reducers, eagerly and inside `tf.function`.

TensorFlow's distribution strategies cannot be given another all-reduce. So gradients are averaged
where they leave the tape: all of one step go through a single operation that runs on the host.
Inside a graph nothing can then reorder them, and ranks never wait for different ones.

An error is a `ReductionError` where TensorFlow runs eagerly. Out of a graph, TensorFlow raises
`tf.errors.UnknownError` instead, whose message holds the error's name and text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # what says that XLA compiles has no other name

from reducer.errors import ConfigError
from worker_client._packing import all_reduce_arrays, broadcast_arrays, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker_client.client.client import Client

    F = TypeVar("F", bound=Callable[..., Any])

do_not_convert: Callable[[F], F] = tf.autograph.experimental.do_not_convert


@do_not_convert
def all_reduce(tensors: Any, op: str = "mean", *, client: Client | None = None) -> Any:
    """Return the reductions of `tensors` over all ranks.

    Every rank must call this with the same shapes and dtypes, in the same order of calls; a graph
    keeps the order in which it was written.

    Args:
        tensors: a tensor, or any nesting of them. None stays None, which it must be at every rank;
            `tf.IndexedSlices` become dense.
        op: ``"sum"``, ``"mean"`` (floating types only), ``"min"``, ``"max"`` or ``"product"``.
        client: the one to use; `worker_client.init()`'s by default.

    Returns:
        Tensors of the same nesting, shapes and dtypes.

    Raises:
        ConfigError: this is compiled by XLA, or runs on several replicas of one process, or a dtype
            cannot be reduced.
        ReductionError: as `Work.wait`, see above.
    """
    function = on_host(lambda used, arrays: all_reduce_arrays(used, arrays, op), client)
    leaves = tf.nest.flatten(tensors)
    given = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
    reduced = iter(run_on_host(function, given, [one.shape for one in given]))
    return tf.nest.pack_sequence_as(
        tensors, [None if leaf is None else next(reduced) for leaf in leaves]
    )


@do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root: int = 0, *, client: Client | None = None
) -> None:
    """Assign to `variables` what they are at rank `root`, bit for bit.

    Call it once before training, after all variables exist, also those of the optimizer.

    Args:
        variables: `tf.Variable` or `keras.Variable`, of the same shapes and dtypes in the same
            order at every rank; not of strings.
        root: the rank whose values they are to have.
        client: the one to use; `worker_client.init()`'s by default.

    Raises:
        ConfigError: as `all_reduce`; or there is no such rank, or a variable holds strings.
        ReductionError: as `Work.wait`, see above.
    """
    function = on_host(lambda used, arrays: broadcast_arrays(used, arrays, root), client)
    variables = list(variables)
    given = [tf.convert_to_tensor(variable) for variable in variables]
    values = run_on_host(function, given, [one.shape for one in given])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` is averaged over all ranks.

    It is used as the tape is, in its place or around it::

        with DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)

    Everything else, such as `watch` and `jacobian`, is the tape's own, and of this rank alone.

    Args:
        tape: the one to wrap; it may have recorded already.
        op: as of `all_reduce`.
        client: the one to use; `worker_client.init()`'s by default.
    """

    @do_not_convert
    def __init__(
        self, tape: tf.GradientTape, *, op: str = "mean", client: Client | None = None
    ) -> None:
        self._tape = tape
        self._op = op
        self._client = client

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tape.__exit__(*exc_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @do_not_convert
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of `target` by `sources`, averaged over all ranks.

        Arguments and result are those of `tf.GradientTape.gradient`, but for gradients that are
        `tf.IndexedSlices`, which come back dense. Every rank must ask for the same sources.

        Raises:
            ConfigError: as `all_reduce`.
            ReductionError: as `Work.wait`, see above.
        """
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        return all_reduce(gradients, self._op, client=self._client)


def run_on_host(
    function: Callable[..., Any], tensors: list[tf.Tensor], shapes: Sequence[Any]
) -> list[tf.Tensor]:
    """Give the arrays of all tensors to `function` in one operation, and return its results.

    Args:
        function: takes the arrays, and returns one of the same dtype for each.
        tensors: may be none, and then nothing is called.
        shapes: of the results, as far as they are known, which TensorFlow cannot find out.

    Raises:
        ConfigError: this is compiled by XLA, or runs on several replicas of one process.
    """
    _check_place()
    if not tensors:
        return []
    if tf.executing_eagerly():  # as tf.numpy_function does, which cannot do scalars of bfloat16
        arrays = [np.asarray(one.numpy(), one.dtype.as_numpy_dtype) for one in tensors]
        return [tf.convert_to_tensor(one) for one in function(*arrays)]
    results = tf.numpy_function(do_not_convert(function), tensors, [one.dtype for one in tensors])
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _check_place() -> None:
    """Refuse where there is no host to call, or one for several replicas.

    Raises:
        ConfigError: the message says what to change.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "code compiled by XLA cannot call the reducers: set jit_compile=False, in "
            "tf.function() or in Keras's model.compile()"
        )
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ConfigError(
            f"{type(tf.distribute.get_strategy()).__name__} runs several replicas, each with its "
            "gradients: start one process for each device, and leave the strategy out"
        )
