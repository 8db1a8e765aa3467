"""Gradients that travel together, from their tensors to the wire and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from reducer.errors import ConfigError
from worker_client.horovod.ops import Handle, Op
from worker_client.horovod.reduction import Asked, start
from worker_client.horovod.sparse import start_sparse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.horovod.groups import Group
    from worker_client.horovod.torch.compression import Compressor

_GATHERED = (Op.AVERAGE, Op.SUM)


class Options(NamedTuple):
    """How gradients are reduced; `DistributedOptimizer` describes it.

    Attributes:
        group: ranks whose gradients are reduced.
        compression: how they travel.
        op: the reduction.
        scales: factors before and after it.
        sparse_as_dense: whether sparse ones travel as dense ones.
    """

    group: Group
    compression: Compressor
    op: Op
    scales: tuple[float, float]
    sparse_as_dense: bool


class Bundle:
    """Parameters whose gradients travel together.

    Args:
        name: of the first one, the same at every rank.
        parameters: at least one.
        options: how they are reduced.
        passes: backward passes until they are complete.

    Attributes:
        handle: the reduction in progress, if it has started.
        left: backward passes until each is complete.
    """

    def __init__(
        self, name: str, parameters: Sequence[torch.Tensor], options: Options, passes: int
    ) -> None:
        self.handle: Handle | None = None
        self.left = [passes] * len(parameters)
        self._name = name
        self._parameters = parameters
        self._options = options

    @property
    def frozen(self) -> bool:
        """Whether no parameter takes part in training any more."""
        return not any(parameter.requires_grad for parameter in self._parameters)

    @property
    def gathers(self) -> bool:
        """Whether the gradient is sparse and stays so, which needs all ranks' indices."""
        return not self._options.sparse_as_dense and any(
            parameter.grad is not None and parameter.grad.is_sparse
            for parameter in self._parameters
        )

    def start(self) -> None:
        """Start the reduction of the gradients; one that was not computed counts as zeros.

        Raises:
            ConfigError: gradients cannot be reduced like this.
        """
        if self.gathers:
            self.handle = self._gather()
            return
        narrowed = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            narrowed.append(self._options.compression.compress(grad.detach()))
        tensors, op = [tensor for tensor, _ in narrowed], self._options.op
        group, scales = self._options.group, self._options.scales
        reduction = start(group, tensors, self._name, scales, lambda: Asked(tensors, None, op))

        def finish() -> None:
            for parameter, (tensor, ctx) in zip(self._parameters, narrowed, strict=True):
                _replace(parameter, self._options.compression.decompress(tensor, ctx))

        self.handle = Handle([reduction], finish)

    def _gather(self) -> Handle:
        parameter, grad = self._parameters[0], self._parameters[0].grad
        if len(self._parameters) > 1 or grad is None or self._options.op not in _GATHERED:
            raise ConfigError(
                f"the sparse gradient of {self._name} can be reduced alone, by Average or Sum: use "
                "sparse_as_dense=True, or leave it out of groups="
            )
        reduction = start_sparse(self._options.group, grad, self._name, self._options.op)
        return Handle([reduction], lambda: _replace(parameter, reduction.wait()))


def _replace(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    """Let a gradient be what it was reduced to; nothing is copied if it was reduced in place."""
    grad = parameter.grad
    if grad is None or reduced.is_sparse:
        parameter.grad = reduced
    elif grad.is_sparse:
        parameter.grad = reduced.to_sparse(grad.sparse_dim())
    elif reduced.data_ptr() != grad.data_ptr():
        grad.copy_(reduced)
