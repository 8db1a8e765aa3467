"""Gradients where they leave a tape: `DistributedGradientTape`, and what optimizers share with it.

All gradients of one call travel together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from reducer.errors import ConfigError
from worker_client import tensorflow as ours
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import Op, predivided
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.mpi_ops import grouped_allreduce, size_op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from worker_client.horovod.torch.compression import Compressor


class Gradients:
    """How gradients are reduced; arguments as of `DistributedGradientTape`."""

    def __init__(
        self,
        compression: Compressor,
        sparse_as_dense: bool,
        op: int | None,
        predivide_factor: float,
        process_set: ProcessSet,
        scale_local: bool,
    ) -> None:
        self._op, self._factors = predivided(op, predivide_factor)
        if not isinstance(process_set, ProcessSet) or process_set.included() is not False:
            group_of(process_set)  # what is missing shows before a graph runs
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._scale_local = scale_local
        self._local: dict[int, Any] = {}  # by their ids, which no other variables get meanwhile

    def keep_local(self, variable: Any) -> None:
        """Leave the gradient of a variable as this rank has it, but divided by their number."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether the gradient of a variable stays as this rank has it."""
        return id(variable) in self._local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return gradients as they are to be applied; None stays None, at every rank alike."""
        results = list(gradients)
        if self._process_set.included() is False:
            return results
        shared = []
        for at, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is not None and self.is_local(variable):
                results[at] = self._scaled(gradient)
            elif gradient is not None:
                shared.append(at)
        sent = [results[at] for at in shared]
        if self._sparse_as_dense:
            sent = [tf.convert_to_tensor(one) for one in sent]
        how = None, "", "", self._compression, self._op, *self._factors, self._process_set
        for at, one in zip(shared, grouped_allreduce(sent, *how), strict=True):
            results[at] = one
        return results

    def _scaled(self, gradient: Any) -> Any:
        """Divide the gradient of a local variable by the number of ranks, as those of others."""
        if not self._scale_local:
            return gradient
        ranks = size_op(self._process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


class _Tape(ours.DistributedGradientTape):
    """What `DistributedGradientTape` returns: the tape's attributes, but for `gradient`."""

    def __init__(self, tape: tf.GradientTape, gradients: Gradients) -> None:
        super().__init__(tape)
        self._gradients = gradients

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as this rank has it, but divided by their number."""
        self._gradients.keep_local(source)

    @ours.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002 (Horovod's)
    ) -> Any:
        """Return the reduced gradients of `target` by `sources`.

        Arguments and result are those of `tf.GradientTape.gradient`. Every rank must ask for the
        same sources.

        Raises:
            ReductionError: as `hvd.allreduce`.
        """
        gradients = self._tape.gradient(target, sources, output_gradients)
        reduced = self._gradients.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of source and gradient: those of local sources, and the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._gradients.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._gradients.is_local(pair[0])]


def DistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,  # noqa: ARG001
    groups: Any = None,  # noqa: ARG001
    process_set: ProcessSet = ALL_RANKS,
    scale_local_gradients: bool = True,
) -> _Tape:
    """Return a tape like `gradtape` whose gradients are reduced over all ranks.

    The tape may have recorded already, or be entered afterwards. Other arguments are those of
    `worker_client.horovod.keras.DistributedOptimizer`; local are the sources that
    ``register_local_source(variable)`` of the result makes such.

    Raises:
        ConfigError: an argument is wrong, or `hvd.init()` was not called.
    """
    predivide, scale = gradient_predivide_factor, scale_local_gradients
    gradients = Gradients(compression, sparse_as_dense, op, predivide, process_set, scale)
    return _Tape(gradtape, gradients)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **kwargs: Any
) -> _Tape:
    """As `DistributedGradientTape`, but the weights of `local_layers` are this rank's own.

    Raises:
        ConfigError: as `DistributedGradientTape`, or one of these is no layer of Keras.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for weight in local_weights(local_layers):
        tape.register_local_source(weight)
    return tape


def local_weights(layers: Any) -> Iterable[Any]:
    """Return the trainable weights of a layer of Keras, or of several, as tapes know them.

    Raises:
        ConfigError: one of them is no layer.
    """
    given = [] if layers is None else layers if isinstance(layers, (list, tuple)) else [layers]
    if any(not hasattr(layer, "trainable_weights") for layer in given):
        raise ConfigError("local_layers= takes layers of Keras, such as model.layers[:1]")
    return [weight for layer in given for weight in layer.trainable_weights]
