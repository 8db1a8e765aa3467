"""Horovod's PyTorch interface over reducers: ``import worker_client.horovod.torch as hvd``."""

from __future__ import annotations

from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.torch import elastic, functions, mpi_ops
from worker_client.horovod.torch.compression import Compression
from worker_client.horovod.torch.functions import *  # noqa: F403
from worker_client.horovod.torch.mpi_ops import *  # noqa: F403
from worker_client.horovod.torch.optimizer import DistributedOptimizer
from worker_client.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm"]
__all__ += ["HostsUpdatedInterrupt", "elastic"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
