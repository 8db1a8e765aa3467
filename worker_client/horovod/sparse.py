"""All-reduce of sparse tensors: indices and values of all ranks are gathered, and added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reducer.errors import ConfigError
from worker_client.horovod.common.process_sets import ALL_RANKS, ProcessSet, group_of
from worker_client.horovod.gather import start_gather
from worker_client.horovod.ops import Handle, Op, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_client.horovod.groups import Group


def start_sparse(group: Group, tensor: torch.Tensor, name: str | None, op: Op) -> Handle:
    """Start the reduction of a sparse tensor; the handle has the reduced one.

    Raises:
        ConfigError: it is dense, or to be reduced otherwise than by `Average` or `Sum`.
    """
    if not tensor.is_sparse:
        raise ConfigError("sparse_allreduce_async takes a sparse tensor: use hvd.allreduce_async")
    if op not in {Op.AVERAGE, Op.SUM}:
        raise ConfigError("a sparse tensor can be reduced by op=hvd.Average or op=hvd.Sum")
    own = tensor.coalesce()
    of_indices, of_values = (
        start_gather(group, part, None if name is None else f"{name}.{what}")
        for part, what in ((own.indices().t(), "indices"), (own.values(), "values"))
    )

    def finish() -> torch.Tensor:
        parts = of_values.wait()
        indices, values = torch.cat(of_indices.wait()), torch.cat(parts)
        if op is Op.AVERAGE:
            values /= len(parts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)
        return total.coalesce()

    return Handle([of_indices, of_values], finish)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = ALL_RANKS
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse tensor over all ranks.

    Args:
        tensor: sparse tensor, of the same shape at every rank; indices may differ.
        name: the same at every rank; None takes a number.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Returns:
        A function that waits for the reduced tensor and returns it.

    Raises:
        ConfigError: the tensor is dense, or `op` is another one.
    """
    return start_sparse(group_of(process_set), tensor, name, choose(op)).wait
