"""Calls of `torture.guarantee` by torch: its tensors, and backward passes of a model of DDP's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from torture.guarantee_plan import GRADIENTS
from worker_client.client.client import Client
from worker_client.ddp import ReductionState, reduction_hook

BUCKET_MB = 0.01  # small parameters share a bucket, the large one has its own


def as_tensor(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Weights(torch.nn.Module):
    """Parameters whose gradients are what its input is: it multiplies one by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList([torch.zeros(count) for count in GRADIENTS])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all products."""
        pairs = zip(self.all, gradients, strict=True)
        return torch.stack([(one * other).sum() for one, other in pairs]).sum()


class Model:
    """A model of DDP's whose gradients are averaged by the client.

    Attributes:
        settled: DDP has given the ranks its order of buckets, by the process group.
    """

    def __init__(self, client: Client) -> None:
        self._model = DistributedDataParallel(Weights(), init_sync=False, bucket_cap_mb=BUCKET_MB)
        # What rounding takes away is not kept: the next mean would depend on it.
        state = ReductionState(client, error_feedback=False)
        self._model.register_comm_hook(state, reduction_hook)
        self.settled = False
        self._passed = False

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the means of gradients over the ranks.

        Raises:
            ReductionError: of a bucket.
        """
        self._model.zero_grad()
        self._model([torch.from_numpy(one) for one in gradients]).backward()
        self.settled, self._passed = self._passed, True
        parameters = self._model.module.all
        return [parameter.grad.numpy().copy() for parameter in parameters]
