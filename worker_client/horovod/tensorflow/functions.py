"""The same variables, and the same objects, at every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet
from worker_client.horovod.tensorflow.mpi_ops import broadcast_
from worker_client.horovod.torch import functions as of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["broadcast_global_variables", "broadcast_variables"]
__all__ += ["allgather_object", "broadcast_object", "broadcast_object_fn"]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = ALL_RANKS,
    inplace: bool = False,  # noqa: ARG001 (Horovod's)
) -> None:
    """Assign to variables what they are at rank `root_rank`, bit for bit.

    They are `tf.Variable` or `keras.Variable`, of the same shapes and dtypes in the same order at
    every rank, such as ``model.variables`` and ``optimizer.variables``; `inplace` changes nothing.

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
    """Return the object of rank `root_rank`, as ``worker_client.horovod.broadcast_object`` does.

    It takes the ``numpy()`` of a `tf.Tensor`, but no `tf.Tensor`; `session` changes nothing.
    """
    return of_torch.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,  # noqa: ARG001 (of TensorFlow 1)
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object alone."""
    return lambda obj: of_torch.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,  # noqa: ARG001 (of TensorFlow 1)
    name: str | None = None,
    process_set: ProcessSet = ALL_RANKS,
) -> list[Any]:
    """Return every rank's object, in rank order; arguments and errors as `broadcast_object`."""
    return of_torch.allgather_object(obj, name, process_set)
