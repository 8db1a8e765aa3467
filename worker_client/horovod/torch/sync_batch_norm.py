"""Batch normalization by the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from reducer.errors import ConfigError
from worker_client.horovod.job import CURRENT
from worker_client.horovod.ops import Op
from worker_client.horovod.torch.mpi_ops import allreduce


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d and 3d, with the mean and the variance of all ranks' batches.

    All ranks call it alike, in training; their batches may be of different sizes. Each call makes
    three all-reduces that wait for each other, and its backward pass two. Arguments are those of
    `torch.nn.BatchNorm1d`.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() < 2:
            raise ConfigError(
                f"SyncBatchNorm takes tensors of (batch, channels, ...), got {input.dim()} "
                "dimensions"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        """Return the normalized tensor, of shape (batch, channels, ...) as the input is.

        Raises:
            ConfigError: it has fewer than two dimensions, or all ranks together fewer than two
                values for each channel.
            ReductionError: as `Client.all_reduce`.
        """
        by_batch = self.training or not self.track_running_stats
        if not by_batch or CURRENT.size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        others = [0, *range(2, input.dim())]  # dimensions besides that of channels
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input if input.dtype is torch.float64 else input.float()
        mine = torch.tensor([input.numel() // input.shape[1]])
        count = allreduce(mine, op=Op.SUM).item()
        if count < 2:
            raise ConfigError(
                "all ranks' batches together have fewer than 2 values for each channel"
            )
        mean = allreduce(wide.sum(others), op=Op.SUM) / count
        centered = wide - mean.view(shape)
        variance = allreduce(centered.square().sum(others), op=Op.SUM) / count
        normalized = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.training and self.track_running_stats:
            self._keep(mean.detach(), variance.detach() * (count / (count - 1)))
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)

    def _keep(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Take them into the running averages."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # Without a momentum all batches count alike.
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
