"""Gradients where they leave a tape: `DistributedGradientTape`, and what optimizers share with it.

All gradients of one call travel together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from reducer.errors import ConfigError
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.ops import Op, choose
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.mpi_ops import grouped_allreduce, size_op
from worker_client.tensorflow import do_not_convert

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from worker_client.horovod.tensorflow.compression import Compressor


class Gradients:
    """How gradients are reduced; arguments as of `DistributedGradientTape`."""

    def __init__(
        self,
        compression: Compressor,
        sparse_as_dense: bool,
        op: int | None,
        gradient_predivide_factor: float,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        self._op = choose(op)
        if gradient_predivide_factor != 1.0 and self._op is not Op.AVERAGE:
            raise ConfigError("gradient_predivide_factor goes with op=hvd.Average alone")
        if not isinstance(process_set, ProcessSet) or process_set.included() is not False:
            group_of(process_set)  # what is missing shows before a graph runs
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
        self._process_set = process_set
        self._scales = scale_local_gradients
        self._local: set[int] = set()
        self._kept: list[Any] = []  # so that no other variable gets the number of one of them

    def keep_local(self, variable: Any) -> None:
        """Leave the gradient of a variable as this rank has it."""
        self._local.add(id(variable))
        self._kept.append(variable)

    def is_local(self, variable: Any) -> bool:
        """Whether the gradient of a variable stays as this rank has it."""
        return id(variable) in self._local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return gradients as they are to be applied; None stays None, at every rank alike.

        Args:
            gradients: dense or `tf.IndexedSlices`.
            variables: of which they are.
        """
        if self._process_set.included() is False:
            return list(gradients)
        results = list(gradients)
        shared = []
        for at, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if self.is_local(variable):
                results[at] = self._scaled(gradient)
            else:
                sparse = isinstance(gradient, tf.IndexedSlices)
                as_dense = sparse and self._sparse_as_dense
                results[at] = tf.convert_to_tensor(gradient) if as_dense else gradient
                shared.append(at)
        reduced = grouped_allreduce(
            [results[at] for at in shared],
            compression=self._compression,
            op=self._op,
            prescale_factor=self._factors[0],
            postscale_factor=self._factors[1],
            process_set=self._process_set,
        )
        for at, one in zip(shared, reduced, strict=True):
            results[at] = one
        return results

    def _scaled(self, gradient: Any) -> Any:
        """Divide the gradient of a local variable by the number of ranks, as those of others."""
        if not self._scales:
            return gradient
        ranks = size_op(self._process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


class _Tape:
    """What `DistributedGradientTape` returns: the tape's attributes, but for `gradient`."""

    def __init__(self, tape: tf.GradientTape, gradients: Gradients) -> None:
        self._tape = tape
        self._gradients = gradients

    def __enter__(self) -> _Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tape.__exit__(*exc_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as this rank has it, but divided by their number."""
        self._gradients.keep_local(source)

    @do_not_convert
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

    Args:
        gradtape: it may have recorded already, or be entered afterwards.
        device_dense: changes nothing.
        device_sparse: changes nothing.
        compression: how gradients travel, one of `Compression`.
        sparse_as_dense: whether `tf.IndexedSlices` travel as dense ones, instead of being gathered.
        op: the reduction, `Average` by default.
        gradient_predivide_factor: gradients are divided by it before an average is taken, and
            multiplied afterwards.
        num_groups: changes nothing: all gradients of a call travel together.
        groups: changes nothing.
        process_set: the ranks that take part; others get their own gradients.
        scale_local_gradients: whether gradients of local sources are divided by the number of
            ranks.

    Raises:
        ConfigError: an argument is wrong, or `hvd.init()` was not called.
    """
    gradients = Gradients(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
    )
    return _Tape(gradtape, gradients)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    *args: Any,
    local_layers: Any = None,
    **kwargs: Any,
) -> _Tape:
    """As `DistributedGradientTape`, but the weights of some layers are this rank's own.

    Args:
        gradtape: as of `DistributedGradientTape`, as are further arguments.
        *args: these.
        local_layers: a layer of Keras, or several.
        **kwargs: further ones.

    Raises:
        ConfigError: as `DistributedGradientTape`, or one of these is no layer.
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
