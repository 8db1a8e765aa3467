"""The calls between ranks that take TensorFlow's tensors, eagerly and inside `tf.function`.

A graph makes its calls in the order in which they were written, and each when the one before it has
ended; those of a list travel together. Devices are accepted and change nothing: tensors are reduced
in host memory. So are scopes of names: calls without a name are counted for each kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from reducer.errors import ConfigError
from worker_client.horovod.allreduce import grouped_allreduce_async_
from worker_client.horovod.broadcasting import broadcast_async_
from worker_client.horovod.common import basics
from worker_client.horovod.common.basics import *  # noqa: F403
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.gather import alltoall_async, grouped_allgather_async
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Op, choose, wait_for_all
from worker_client.horovod.reducescatter import grouped_reducescatter_async
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.host import HOST
from worker_client.tensorflow import do_not_convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker_client.horovod.tensorflow.compression import Compressor

_LINEAR = (Op.AVERAGE, Op.SUM)
_with_gradient: Callable[[Callable[..., Any]], Callable[..., Any]] = tf.custom_gradient

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += basics.__all__


def _differentiable(
    tensors: Sequence[Any],
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    shapes: Sequence[Any],
    gradient: Callable[..., Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Make a call as `Host.call` does, whose results have `gradient` for that of the tensors."""

    @_with_gradient
    def call(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Sequence[tf.Tensor]]]:
        return HOST.call(function, given, shapes), do_not_convert(gradient)

    return list(call(*(tf.convert_to_tensor(one) for one in tensors)))


def _rows_unknown(tensors: Sequence[tf.Tensor]) -> list[tf.TensorShape]:
    """Return shapes of which the first dimension is not known."""
    return [
        tf.TensorShape([None, *one.shape[1:]]) if one.shape.rank else tf.TensorShape(None)
        for one in tensors
    ]


# -- all-reduce ---------------------------------------------------------------------------------


def _reduce(
    tensors: Sequence[Any],
    name: str | None,
    op: Op,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Return the reductions of dense tensors, which travel together."""

    def on_host(given: list[torch.Tensor]) -> list[torch.Tensor]:
        reduced: list[torch.Tensor] = grouped_allreduce_async_(
            given, None, name, op, *scales, process_set
        ).wait()
        return reduced

    def gradient(*grads: tf.Tensor) -> list[tf.Tensor]:
        if op not in _LINEAR:
            raise ConfigError(
                f"the gradient of {op.name.title()} is not defined: reduce tf.stop_gradient(tensor)"
            )
        return _reduce(grads, None, op, scales, process_set)

    return _differentiable(tensors, on_host, [one.shape for one in tensors], gradient)


def _reduce_slices(
    tensors: Sequence[tf.IndexedSlices],
    name: str | None,
    op: Op,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """Return the reductions of sparse tensors: all ranks' slices."""
    if not tensors:
        return []
    of_values, of_indices = (None if name is None else f"{name}.{part}" for part in "vi")
    values = grouped_allgather([one.values for one in tensors], of_values, process_set=process_set)
    indices = grouped_allgather(
        [one.indices for one in tensors], of_indices, process_set=process_set
    )
    factor = scales[0] * scales[1]
    if op is Op.AVERAGE:
        ranks = _number(lambda: group_of(process_set).size)
        values = [one / tf.cast(ranks, one.dtype) for one in values]
    if factor != 1.0:
        values = [one * tf.cast(factor, one.dtype) for one in values]
    return [
        tf.IndexedSlices(value, index, one.dense_shape)
        for value, index, one in zip(values, indices, tensors, strict=True)
    ]


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001 (Horovod's)
    device_sparse: str = "",  # noqa: ARG001
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL_RANKS,
    ignore_name_scope: bool = False,  # noqa: ARG001
    name: str | None = None,
) -> list[Any]:
    """As `allreduce`, of a list of tensors, which travel together.

    Args:
        tensors: `tf.Tensor`, `tf.Variable` or `tf.IndexedSlices`, of the same shapes and dtypes at
            every rank.
        average: the older way to say `Average` or `Sum`.
        device_dense: changes nothing.
        device_sparse: changes nothing.
        compression: how they travel, one of `Compression`.
        op: as of `allreduce`.
        prescale_factor: what the contributions are multiplied by.
        postscale_factor: what the results are multiplied by.
        process_set: the ranks that take part.
        ignore_name_scope: changes nothing.
        name: the same at every rank; by default numbered.
    """
    sparse = [at for at, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)]
    if sparse and op not in {None, *_LINEAR}:
        raise NotImplementedError(  # as Horovod does, Adasum included
            "tf.IndexedSlices can be reduced by op=hvd.Average or op=hvd.Sum: use "
            "tf.convert_to_tensor() for others"
        )
    chosen, scales = choose(op, average), (prescale_factor, postscale_factor)
    dense = [at for at, one in enumerate(tensors) if not isinstance(one, tf.IndexedSlices)]
    results = list(tensors)
    slices = _reduce_slices([tensors[at] for at in sparse], name, chosen, scales, process_set)
    for at, one in zip(sparse, slices, strict=True):
        results[at] = one
    narrow = [compression.compress(tf.convert_to_tensor(tensors[at])) for at in dense]
    if narrow:
        reduced = _reduce([one for one, _ in narrow], name, chosen, scales, process_set)
        for at, one, (_, ctx) in zip(dense, reduced, narrow, strict=True):
            results[at] = compression.decompress(one, ctx)
    return results


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001 (Horovod's)
    device_sparse: str = "",  # noqa: ARG001
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
    ignore_name_scope: bool = False,  # noqa: ARG001
) -> Any:
    """Return the reduction of a tensor over all ranks, through which gradients pass.

    Args:
        tensor: `tf.Tensor` or `tf.Variable`, of the same shape and dtype at every rank; or
            `tf.IndexedSlices`, whose slices are gathered.
        average: the older way to say `Average` or `Sum`.
        device_dense: changes nothing.
        device_sparse: changes nothing.
        compression: how it travels, one of `Compression`.
        op: `Average` (the default; of integers rounded towards zero), `Sum`, `Min`, `Max` or
            `Product`. Gradients pass through the first two.
        prescale_factor: what the contributions are multiplied by.
        postscale_factor: what the result is multiplied by.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.
        ignore_name_scope: changes nothing.

    Raises:
        ConfigError: a tensor or an argument is not supported.
        NotImplementedError: `op` is not defined for `tf.IndexedSlices`.
        ReductionError: as `Client.all_reduce`, and one of `tf.errors` as well: see `Host.call`.
    """
    (reduced,) = grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
    )
    return reduced


# -- all-gather, broadcast, all-to-all ----------------------------------------------------------


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> list[tf.Tensor]:
    """As `allgather`, of a list of tensors."""
    given = [tf.convert_to_tensor(one) for one in tensors]

    def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if any(one.dim() == 0 for one in tensors):
            raise ConfigError("allgather takes tensors of one dimension or more: use tf.reshape()")
        gathered: list[torch.Tensor] = grouped_allgather_async(tensors, name, process_set).wait()
        return gathered

    def gradient(*grads: tf.Tensor) -> list[tf.Tensor]:
        reduced = _reduce(grads, None, Op.AVERAGE, (1.0, 1.0), process_set)
        mine = [tf.shape(one)[:1] for one in given]
        everybody = grouped_allgather(mine, process_set=process_set)
        at = _number(lambda: group_of(process_set).rank)
        starts = [tf.reduce_sum(rows[:at]) for rows in everybody]
        parts = zip(reduced, starts, mine, strict=True)
        return [grad[start : start + rows[0]] for grad, start, rows in parts]

    return _differentiable(given, on_host, _rows_unknown(given), gradient)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> tf.Tensor:
    """Return all ranks' tensors, one after the other along the first dimension.

    Args:
        tensor: of any numbers; only the first dimension may differ between ranks. Gradients pass
            through it.
        name: the same at every rank; by default numbered.
        ignore_name_scope: changes nothing.
        process_set: the ranks that take part.

    Raises:
        ConfigError: it has no dimension.
        MismatchError: shapes or dtypes do not fit together.
    """
    (gathered,) = grouped_allgather([tensor], name, process_set=process_set)
    return gathered


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> tf.Tensor:
    """Return what a tensor is at rank `root_rank`, bit for bit.

    Args:
        tensor: of any numbers, of the same shape at every rank. Gradients pass through it, to the
            root.
        root_rank: the rank whose values it is to be, as ``hvd.rank()`` numbers it.
        name: the same at every rank; by default numbered.
        ignore_name_scope: changes nothing.
        process_set: the ranks that take part.
    """
    names = None if name is None else [name]
    (received,) = _broadcast_all([tf.convert_to_tensor(tensor)], root_rank, names, process_set)
    return received


def _broadcast_all(
    tensors: Sequence[tf.Tensor],
    root_rank: int,
    names: Sequence[str] | None,
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    """Broadcast tensors, all at once."""

    def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        named: Sequence[str | None] = names or [None] * len(tensors)
        handles = [
            broadcast_async_(one, root_rank, its, process_set)
            for one, its in zip(tensors, named, strict=True)
        ]
        wait_for_all(handles)
        return tensors

    def gradient(*grads: tf.Tensor) -> list[tf.Tensor]:
        reduced = _reduce(grads, None, Op.AVERAGE, (1.0, 1.0), process_set)
        is_root = tf.equal(rank_op(), root_rank)
        return [tf.where(is_root, one, tf.zeros_like(one)) for one in reduced]

    return _differentiable(tensors, on_host, [one.shape for one in tensors], gradient)


@do_not_convert
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> list[tf.Tensor]:
    """Assign to variables what they are at rank `root_rank`, and return their values.

    Args:
        variables: `tf.Variable` or `keras.Variable`, of the same shapes and dtypes in the same
            order at every rank.
        root_rank: the rank whose values they are to have.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.
    """
    variables = list(variables)
    names = None if name is None else [f"{name}.{at}" for at in range(len(variables))]
    given = [tf.convert_to_tensor(one) for one in variables]
    values = _broadcast_all(given, root_rank, names, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return values


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Give each rank some of this rank's rows, and return those that others have for this one.

    Args:
        tensor: of any numbers; only the first dimension may differ between ranks. Gradients pass
            through it.
        splits: how many rows go to each rank, in rank order, int32; None for equally many.
        name: the same at every rank; by default numbered.
        ignore_name_scope: changes nothing.
        process_set: the ranks that take part.

    Returns:
        The received rows, in rank order; with `splits` also how many came from each rank, int32.

    Raises:
        ConfigError: `splits` is not right for the tensor.
        MismatchError: shapes or dtypes do not fit together.
    """
    given = tf.convert_to_tensor(tensor)
    asked = tf.zeros(0, tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)

    def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        rows, counts = tensors
        size = group_of(process_set).size
        if splits is not None or rows.dim() == 0 or rows.shape[0] % size:
            given = None if splits is None else counts  # None is refused
        else:  # how many come from the others is to be known as well
            given = torch.full((size,), rows.shape[0] // size, dtype=torch.int32)
        return list(alltoall_async(rows, given, name, process_set).wait())

    @_with_gradient
    def call(rows: tf.Tensor) -> Any:
        shapes = [*_rows_unknown([rows]), tf.TensorShape([None])]
        received, counts = HOST.call(on_host, [rows, asked], shapes)

        @do_not_convert
        def gradient(grad: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            back, _ = alltoall(grad, counts, process_set=process_set)
            left = tf.shape(rows)[0] - tf.shape(back)[0]  # rows that went to nobody
            none = tf.zeros(tf.concat([[left], tf.shape(rows)[1:]], 0), back.dtype)
            return tf.concat([back, none], 0)

        return (received, counts), gradient

    received, counts = call(given)
    return received if splits is None else (received, counts)


# -- reduce-scatter -----------------------------------------------------------------------------


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",  # noqa: ARG001 (Horovod's)
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = ALL_RANKS,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """As `reducescatter`, of a list of tensors, which travel together."""
    if not tensors:
        return []
    narrow = [compression.compress(tf.convert_to_tensor(one)) for one in tensors]
    given = [one for one, _ in narrow]

    def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = grouped_reducescatter_async(
            tensors, name, op, process_set, prescale_factor, postscale_factor
        ).wait()
        return rows

    def gradient(*grads: tf.Tensor) -> list[tf.Tensor]:
        factor = prescale_factor * postscale_factor
        ranks = _number(lambda: group_of(process_set).size) if choose(op) is Op.SUM else 1
        scaled = [one * tf.cast(ranks, one.dtype) * tf.cast(factor, one.dtype) for one in grads]
        return grouped_allgather(scaled, process_set=process_set)

    rows = _differentiable(given, on_host, _rows_unknown(given), gradient)
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(rows, narrow, strict=True)]


def reducescatter(
    tensor: Any,
    device_dense: str = "",  # noqa: ARG001 (Horovod's)
    compression: Compressor = Compression.none,
    op: int = Op.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
    ignore_name_scope: bool = False,  # noqa: ARG001
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Return this rank's rows of the reduction; arguments as `allreduce`.

    Rows are those of the first dimension, divided equally; the first ranks have one more each if
    there is a remainder. Gradients pass through it.

    Raises:
        ConfigError: `op` is neither `Average` nor `Sum`, or the tensor is a scalar.
    """
    (rows,) = grouped_reducescatter(
        [tensor],
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )
    return rows


# -- what is known when a graph runs ------------------------------------------------------------


def _number(function: Callable[[], int]) -> tf.Tensor:
    """Return a number, int32, that is found when a graph runs, as ranks may come and go."""
    (number,) = HOST.call(
        lambda _: [torch.tensor(function(), dtype=torch.int32)], [tf.constant(0)], [()]
    )
    return number


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return the number of ranks, of a process set if one is named, int32."""
    return _number(lambda: len(_ranks(process_set_id)))


def process_set_included_op(
    process_set_id: int = 0,
    name: str | None = None,  # noqa: ARG001 (Horovod's)
) -> tf.Tensor:
    """Return 1 if this rank is in a process set, else 0, int32."""
    return _number(lambda: int(CURRENT.rank() in _ranks(process_set_id)))


def _ranks(process_set_id: int) -> Sequence[int]:
    if process_set_id == 0:
        return range(CURRENT.size())
    if process_set_id not in CURRENT.job.parts:
        raise ConfigError(f"there is no process set {process_set_id}: call hvd.add_process_set()")
    return CURRENT.job.parts[process_set_id].ranks


def rank_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001 (Horovod's)
    """Return the number of this rank, int32."""
    return _number(CURRENT.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001 (Horovod's)
    """Return the number of this rank among those of its host, int32."""
    return _number(CURRENT.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001 (Horovod's)
    """Return the number of ranks on this host, int32."""
    return _number(CURRENT.local_size)
