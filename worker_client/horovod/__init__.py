"""Horovod's PyTorch interface over reducers: ``import worker_client.horovod as hvd``.

A script for Horovod runs unchanged but for that line. What it means, and what is refused, is in
``docs/horovod.md``.
"""

from __future__ import annotations

from typing import Any

from reducer.errors import ReductionError as HorovodInternalError
from worker_client.horovod import elastic
from worker_client.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from worker_client.horovod.broadcasting import (
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from worker_client.horovod.elastic import HostsUpdatedInterrupt
from worker_client.horovod.gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
)
from worker_client.horovod.job import CURRENT
from worker_client.horovod.join import join
from worker_client.horovod.objects import allgather_object, broadcast_object
from worker_client.horovod.ops import (
    Adasum,
    Average,
    Compression,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    poll,
    synchronize,
)
from worker_client.horovod.optimizer import DistributedOptimizer
from worker_client.horovod.process_sets import ALL_RANKS as global_process_set  # noqa: N811
from worker_client.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    init,
    remove_process_set,
)
from worker_client.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from worker_client.horovod.sparse import sparse_allreduce_async
from worker_client.horovod.state import broadcast_optimizer_state, broadcast_parameters
from worker_client.horovod.sync_batch_norm import SyncBatchNorm

shutdown = CURRENT.shutdown
is_initialized = CURRENT.is_initialized
rank = CURRENT.rank
size = CURRENT.size
local_rank = CURRENT.local_rank
local_size = CURRENT.local_size
cross_rank = CURRENT.cross_rank
cross_size = CURRENT.cross_size
is_homogeneous = CURRENT.is_homogeneous
start_timeline = CURRENT.start_timeline
stop_timeline = CURRENT.stop_timeline

_NOT_HERE = {
    "run": "start the script with torchrun or mpirun",
}
# What Horovod was built with decides there what is possible; here it is always the same.
_BUILT_WITHOUT = (
    *("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    if name in _BUILT_WITHOUT:
        return lambda: False
    if name in _NOT_HERE:
        raise AttributeError(f"hvd.{name} is not available: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
