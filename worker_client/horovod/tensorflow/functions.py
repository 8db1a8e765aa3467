"""The same variables, and the same objects, at every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worker_client.horovod import objects
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet
from worker_client.horovod.tensorflow.mpi_ops import broadcast_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = ALL_RANKS,
    inplace: bool = False,  # noqa: ARG001 (Horovod's)
) -> None:
    """Assign to variables what they are at rank `root_rank`, bit for bit.

    Args:
        variables: `tf.Variable` or `keras.Variable`, of the same shapes and dtypes in the same
            order at every rank; such as ``model.variables`` and ``optimizer.variables``.
        root_rank: the rank whose values they are to have, as ``hvd.rank()`` numbers it.
        process_set: the ranks that take part.
        inplace: changes nothing.

    Raises:
        MismatchError: ranks disagree on the root, a dtype or a shape; nothing was assigned.
        ReductionError: as `Client.all_reduce`.
    """
    broadcast_(variables, root_rank, process_set=process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse, as Horovod does where TensorFlow runs eagerly: it knows no global variables.

    Raises:
        RuntimeError: always; it says what to call.
    """
    raise RuntimeError(
        "TensorFlow 2 has no global variables: call "
        f"hvd.broadcast_variables(model.variables, {root_rank}), and again with those of the "
        "optimizer"
    )


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: None = None,  # noqa: ARG001 (of TensorFlow 1)
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Any:
    """Return the object of rank `root_rank`; what others pass is ignored.

    Args:
        obj: None, numbers, strings, bytes, NumPy arrays, and lists, tuples, sets and dictionaries
            of such; of a `tf.Tensor`, its ``numpy()``.
        root_rank: whose object it is.
        session: changes nothing.
        name: the same at every rank; by default numbered.
        process_set: the ranks that take part.

    Raises:
        ConfigError: it is of another type, at every rank alike.
        ReductionError: as `Client.all_reduce`.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,  # noqa: ARG001 (of TensorFlow 1)
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object alone."""
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,  # noqa: ARG001 (of TensorFlow 1)
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> list[Any]:
    """Return every rank's object, in rank order; arguments and errors as `broadcast_object`."""
    return objects.allgather_object(obj, name, process_set)
