"""What the interfaces of all frameworks have: the job, its ranks, their sets, and reductions."""

from __future__ import annotations

from worker_client.horovod.common.exceptions import HorovodInternalError
from worker_client.horovod.common.process_sets import ALL_RANKS as global_process_set  # noqa: N811
from worker_client.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    init,
    remove_process_set,
)
from worker_client.horovod.common.util import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from worker_client.horovod.job import CURRENT
from worker_client.horovod.join import join
from worker_client.horovod.ops import Adasum, Average, Max, Min, Product, Sum

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

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
