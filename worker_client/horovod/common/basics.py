"""What the interfaces of all frameworks have: the job, its ranks, their sets, and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import ConfigError
from worker_client.horovod.common import process_sets, util
from worker_client.horovod.common.exceptions import HorovodInternalError
from worker_client.horovod.common.process_sets import *  # noqa: F403
from worker_client.horovod.common.process_sets import ALL_RANKS as global_process_set  # noqa: N811
from worker_client.horovod.common.util import *  # noqa: F403
from worker_client.horovod.job import CURRENT
from worker_client.horovod.objects import torch_dtype
from worker_client.horovod.ops import Adasum, Average, Max, Min, Product, Sum, neutral

if TYPE_CHECKING:
    from worker_client.fusion.negotiation import Tensor

shutdown, is_initialized = CURRENT.shutdown, CURRENT.is_initialized
rank, size, is_homogeneous = CURRENT.rank, CURRENT.size, CURRENT.is_homogeneous
local_rank, local_size = CURRENT.local_rank, CURRENT.local_size
cross_rank, cross_size = CURRENT.cross_rank, CURRENT.cross_size
start_timeline, stop_timeline = CURRENT.start_timeline, CURRENT.stop_timeline

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]
__all__ += ["HorovodInternalError", "global_process_set", "is_initialized", "join", "shutdown"]
__all__ += ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]
__all__ += ["is_homogeneous", "start_timeline", "stop_timeline"]
__all__ += process_sets.__all__
__all__ += util.__all__


def join(device: int = -1) -> int:  # noqa: ARG001 (tensors are reduced in host memory)
    """Wait until every rank has called it, and take part in the others' calls meanwhile.

    Others may go on with all-reduces and with steps of `DistributedOptimizer`; this rank
    contributes what changes nothing (zeros to a sum), and averages are still over all ranks. Its
    own weights stay as they are. A call that needs this rank's data (a broadcast, an all-gather)
    fails at the others, with an error that says so.

    Returns:
        The rank that has made most calls since the latest `join()`, the highest of several. Every
        rank returns the same. `device` changes nothing.

    Raises:
        ReductionError: as `Client.all_reduce`; for instance no rank has made a call for the whole
            timeout.
    """
    job = CURRENT.job
    calls = np.zeros(job.client.world_size, np.int64)
    calls[job.client.rank] = 1 + job.begin_join()  # 0: a rank that is lost
    job.client.join(calls, _stand_in).wait()
    return job.present.index(int(np.flatnonzero(calls == calls.max())[-1]))


def _stand_in(tensor: Tensor) -> Any:
    """Return what this rank, which has joined, contributes to a tensor of active ranks."""
    if not tensor.name.startswith("allreduce."):
        raise ConfigError(
            f"{tensor.name} needs the data of a rank that has joined: until all have joined, only "
            "all-reduces and optimizer steps are possible"
        )
    return neutral(tensor.op, tensor.nbytes, torch_dtype(tensor.dtype.name.lower()))
