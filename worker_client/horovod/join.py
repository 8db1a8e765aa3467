"""`join()`: a rank without data left takes part in what the others still do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import ConfigError
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import neutral, torch_dtype

if TYPE_CHECKING:
    from worker_client.fusion.negotiation import Tensor


def join(device: int = -1) -> int:
    """Wait until every rank has called it, and take part in the others' calls meanwhile.

    Others may go on with all-reduces and with steps of `DistributedOptimizer`; this rank
    contributes what changes nothing (zeros to a sum), and averages are still over all ranks. Its
    own weights stay as they are. A call that needs this rank's data (a broadcast, an all-gather)
    fails at the others, with an error that says so.

    Args:
        device: is accepted and changes nothing: tensors are reduced in host memory.

    Returns:
        The rank that has made most calls since the latest `join()`, the highest of several. Every
        rank returns the same.

    Raises:
        ReductionError: as `Client.all_reduce`; for instance no rank has made a call for the whole
            timeout.
    """
    del device
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
