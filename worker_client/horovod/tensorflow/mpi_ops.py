"""The calls between ranks that take TensorFlow's tensors, eagerly and inside `tf.function`.

A graph makes its calls in the order in which they were written, and each when the one before it has
ended; those of a list travel together. Devices are accepted and change nothing: tensors are reduced
in host memory. So are scopes of names: calls without a name are counted for each kind. All other
arguments are those of the same call in `worker_client.horovod`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
import torch

from reducer.errors import ConfigError
from worker_client.horovod.common import basics
from worker_client.horovod.common.basics import *  # noqa: F403
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.groups import start_alltoall
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import LINEAR, Handle, Op, choose
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.host import HOST
from worker_client.horovod.torch import mpi_ops as of_torch
from worker_client.horovod.torch.compression import compressed
from worker_client.tensorflow import do_not_convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker_client.horovod.torch.compression import Compressor

    Tensors = Sequence[tf.Tensor]
    How = tuple[Op, tuple[float, float], ProcessSet]  # with factors before and after

_with_gradient: Callable[[Callable[..., Any]], Callable[..., Any]] = tf.custom_gradient

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "reducescatter"]
__all__ += ["grouped_allgather", "grouped_allreduce", "grouped_reducescatter"]
__all__ += ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]
__all__ += basics.__all__


def _differentiable(
    tensors: Sequence[Any],
    start: Callable[[list[torch.Tensor]], Handle],
    gradient: Callable[..., Tensors],
    *,
    rows: bool = False,
) -> list[tf.Tensor]:
    """Return the results of a call, which have a gradient; `rows`: of any first dimensions."""
    given = [tf.convert_to_tensor(one) for one in tensors]
    shapes = [_rows_unknown(one) if rows else one.shape for one in given]

    @_with_gradient
    def call(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Tensors]]:
        results = HOST.call(lambda tensors: start(tensors).wait(), given, shapes)
        return results, do_not_convert(gradient)

    return list(call(*given))


def _rows_unknown(tensor: tf.Tensor) -> tf.TensorShape:
    return tf.TensorShape([None, *tensor.shape[1:]] if tensor.shape.rank else None)


def _reduce(tensors: Sequence[Any], name: str | None, how: How) -> list[tf.Tensor]:
    """Return the reductions of dense tensors, which travel together."""
    op, scales, process_set = how

    def start(given: list[torch.Tensor]) -> Handle:
        return of_torch.grouped_allreduce_async_(given, None, name, op, *scales, process_set)

    def gradient(*grads: tf.Tensor) -> Tensors:
        if op not in LINEAR:
            raise ConfigError(
                f"the gradient of {op.name.title()} is not defined: reduce tf.stop_gradient(tensor)"
            )
        return _reduce(grads, None, how)

    return _differentiable(tensors, start, gradient)


def _average(tensors: Tensors, process_set: ProcessSet) -> list[tf.Tensor]:
    return _reduce(tensors, None, (Op.AVERAGE, (1.0, 1.0), process_set))


def _reduce_slices(
    tensors: Sequence[tf.IndexedSlices], name: str | None, how: How
) -> list[tf.IndexedSlices]:
    """Return the reductions of sparse tensors: all ranks' slices."""
    if not tensors:
        return []
    op, (before, after), process_set = how
    gathered = []
    for part in ("values", "indices"):
        its_name = None if name is None else f"{name}.{part[0]}"
        given = [getattr(one, part) for one in tensors]
        gathered.append(grouped_allgather(given, its_name, process_set=process_set))
    values, indices = gathered
    if op is Op.AVERAGE:
        ranks = _number(lambda: group_of(process_set).size)
        values = [one / tf.cast(ranks, one.dtype) for one in values]
    if before * after != 1.0:
        values = [one * tf.cast(before * after, one.dtype) for one in values]
    dense_shapes = [one.dense_shape for one in tensors]
    return list(map(tf.IndexedSlices, values, indices, dense_shapes))


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

    It is a `tf.Tensor` or `tf.Variable`, of the same shape and dtype at every rank; or
    `tf.IndexedSlices`, whose slices are gathered. Other arguments are those of
    `worker_client.horovod.allreduce`; devices and the scope of names change nothing.

    Raises:
        ConfigError: a tensor or an argument is not supported.
        NotImplementedError: `op` is not defined for `tf.IndexedSlices`.
        ReductionError: as `Client.all_reduce`, and one of `tf.errors` as well: see `Host.call`.
    """
    scales = prescale_factor, postscale_factor
    given = average, "", "", compression, op, *scales, process_set, False, name
    return grouped_allreduce([tensor], *given)[0]


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
    """As `allreduce`, of a list of tensors, which travel together."""
    sparse = [at for at, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)]
    if sparse and op not in {None, *LINEAR}:
        raise NotImplementedError(  # as Horovod does, Adasum included
            "tf.IndexedSlices can be reduced by op=hvd.Average or op=hvd.Sum: use "
            "tf.convert_to_tensor() for others"
        )
    given: How = choose(op, average), (prescale_factor, postscale_factor), process_set
    dense = [at for at in range(len(tensors)) if at not in sparse]
    reduced: list[Any] = _reduce_slices([tensors[at] for at in sparse], name, given)
    if dense:
        wide = [tf.convert_to_tensor(tensors[at]) for at in dense]
        reduced += compressed(compression, wide, lambda narrow: _reduce(narrow, name, given))
    by_place = dict(zip([*sparse, *dense], reduced, strict=True))
    return [by_place[at] for at in range(len(tensors))]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> tf.Tensor:
    """Return all ranks' tensors, one after the other along the first dimension.

    They are of any numbers; only the first dimension may differ between ranks. Gradients pass
    through it. Arguments are those of `worker_client.horovod.allgather`.

    Raises:
        ConfigError: it has no dimension.
        MismatchError: shapes or dtypes do not fit together.
    """
    return grouped_allgather([tensor], name, process_set=process_set)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> list[tf.Tensor]:
    """As `allgather`, of a list of tensors."""

    def start(tensors: list[torch.Tensor]) -> Handle:
        if any(one.dim() == 0 for one in tensors):
            raise ConfigError("allgather takes tensors of one dimension or more: use tf.reshape()")
        return of_torch.grouped_allgather_async(tensors, name, process_set)

    def gradient(*grads: tf.Tensor) -> Tensors:
        mine = [tf.shape(one)[:1] for one in given]
        everybody = grouped_allgather(mine, process_set=process_set)
        at = _number(lambda: group_of(process_set).rank)
        begins = [tf.reduce_sum(rows[:at]) for rows in everybody]
        parts = zip(_average(grads, process_set), begins, mine, strict=True)
        return [grad[begin : begin + rows[0]] for grad, begin, rows in parts]

    given = [tf.convert_to_tensor(one) for one in tensors]
    return _differentiable(given, start, gradient, rows=True)


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> tf.Tensor:
    """Return what a tensor is at rank `root_rank`, bit for bit.

    It is of any numbers, of the same shape at every rank. Gradients pass through it, to the root.
    Arguments are those of `worker_client.horovod.broadcast`.
    """
    return _broadcast([tensor], root_rank, [name], process_set)[0]


@do_not_convert
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> list[tf.Tensor]:
    """Assign to variables what they are at rank `root_rank`, and return their values.

    They are those of `broadcast_variables`; other arguments are those of `broadcast`.
    """
    variables = list(variables)
    names = [None if name is None else f"{name}.{at}" for at in range(len(variables))]
    values = _broadcast(variables, root_rank, names, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return values


def _broadcast(
    tensors: Sequence[Any], root_rank: int, names: Sequence[str | None], process_set: ProcessSet
) -> list[tf.Tensor]:
    """Broadcast tensors, all at once."""

    def start(tensors: list[torch.Tensor]) -> Handle:
        handles = [
            of_torch.broadcast_async_(one, root_rank, name, process_set)
            for one, name in zip(tensors, names, strict=True)
        ]
        return Handle(handles, lambda: tensors)

    def gradient(*grads: tf.Tensor) -> Tensors:
        is_root = tf.equal(rank_op(), root_rank)
        reduced = _average(grads, process_set)
        return [tf.where(is_root, one, tf.zeros_like(one)) for one in reduced]

    return _differentiable(tensors, start, gradient)


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001 (Horovod's)
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Give each rank some of this rank's rows, and return those that others have for this one.

    Arguments are those of `worker_client.horovod.alltoall`, numbers of rows int32. Gradients pass
    through it.

    Raises:
        ConfigError: `splits` is not right for the tensor.
        MismatchError: shapes or dtypes do not fit together.
    """
    asked = tf.zeros(0, tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)

    def on_host(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        rows, counts = tensors
        given = None if splits is None else counts
        received, sizes = start_alltoall(group_of(process_set), rows, given, name).wait()
        return [received, torch.tensor(sizes, dtype=torch.int32)]

    @_with_gradient
    def call(rows: tf.Tensor) -> Any:
        shapes = [_rows_unknown(rows), tf.TensorShape([None])]
        received, counts = HOST.call(on_host, [rows, asked], shapes)

        @do_not_convert
        def gradient(grad: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            back, _ = alltoall(grad, counts, process_set=process_set)
            left = tf.shape(rows)[0] - tf.shape(back)[0]  # rows that went to nobody
            none = tf.zeros(tf.concat([[left], tf.shape(rows)[1:]], 0), back.dtype)
            return tf.concat([back, none], 0)

        return (received, counts), gradient

    received, counts = call(tf.convert_to_tensor(tensor))
    return received if splits is None else (received, counts)


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
    scales = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], "", compression, op, process_set, *scales, name)[0]


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
    scales = prescale_factor, postscale_factor

    def start(tensors: list[torch.Tensor]) -> Handle:
        return of_torch.grouped_reducescatter_async(tensors, name, op, process_set, *scales)

    def gradient(*grads: tf.Tensor) -> Tensors:
        ranks = _number(lambda: group_of(process_set).size) if choose(op) is Op.SUM else 1
        factor = scales[0] * scales[1]
        scaled = [one * tf.cast(ranks, one.dtype) * tf.cast(factor, one.dtype) for one in grads]
        return grouped_allgather(scaled, process_set=process_set)

    def call(narrow: Tensors) -> list[tf.Tensor]:
        return _differentiable(narrow, start, gradient, rows=True)

    return compressed(compression, [tf.convert_to_tensor(one) for one in tensors], call)


def _number(function: Callable[[], int]) -> tf.Tensor:
    """Return a number, int32, that is found when a graph runs, as ranks may come and go."""
    (number,) = HOST.call(
        lambda _: [torch.tensor(function(), dtype=torch.int32)], [tf.constant(0)], [()]
    )
    return number


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return the number of ranks, of a process set if one is named, int32."""
    return _number(lambda: len(_ranks(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return 1 if this rank is in a process set, else 0, int32."""
    return _number(lambda: int(CURRENT.rank() in _ranks(process_set_id)))


def _ranks(process_set_id: int) -> Sequence[int]:
    if process_set_id == 0:
        return range(CURRENT.size())
    if process_set_id not in CURRENT.job.process_sets:
        raise ConfigError(f"there is no process set {process_set_id}: call hvd.add_process_set()")
    return CURRENT.job.process_sets[process_set_id].ranks


def rank_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return the number of this rank, int32."""
    return _number(CURRENT.rank)


def local_rank_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return the number of this rank among those of its host, int32."""
    return _number(CURRENT.local_rank)


def local_size_op(name: str | None = None) -> tf.Tensor:  # noqa: ARG001
    """Return the number of ranks on this host, int32."""
    return _number(CURRENT.local_size)
