"""Horovod's TensorFlow 2 interface over reducers: ``import worker_client.horovod.tensorflow``.

It is for eager calls and `tf.function`, on the host. What calls mean, and what is refused, is in
``docs/horovod.md``. PyTorch has to be installed: it holds what is sent.
"""

from __future__ import annotations

from typing import Any

from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.ops import Op
from worker_client.horovod.tensorflow import elastic, functions, mpi_ops
from worker_client.horovod.tensorflow.compression import Compression
from worker_client.horovod.tensorflow.functions import *  # noqa: F403
from worker_client.horovod.tensorflow.gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from worker_client.horovod.tensorflow.mpi_ops import *  # noqa: F403

__all__ = ["Compression", "DistributedGradientTape", "PartialDistributedGradientTape"]
__all__ += ["DistributedOptimizer", "HostsUpdatedInterrupt", "elastic"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001 (of TensorFlow 1)
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Op.AVERAGE,
    **kwargs: Any,
) -> Any:
    """Return `worker_client.horovod.keras.DistributedOptimizer` of the same arguments."""
    from worker_client.horovod import keras  # noqa: PLC0415 (who has no optimizer needs no Keras)

    given = name, device_dense, device_sparse, compression, sparse_as_dense
    kwargs |= {"op": op, "backward_passes_per_step": backward_passes_per_step}
    return keras.DistributedOptimizer(optimizer, *given, **kwargs)
