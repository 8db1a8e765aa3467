"""What a backward pass raises when several of its buckets fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reducer.errors import ConfigError

torch = pytest.importorskip("torch", reason="needs torch")

from worker_client.ddp import ReductionState  # noqa: E402 (it imports torch)

if TYPE_CHECKING:
    from worker_client.client.client import Client


def test_the_first_error_is_raised(client: Client) -> None:
    state = ReductionState(client)
    buckets = [torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.complex64)]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            del context
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            del context
            for bucket in buckets:
                state.start(bucket)
            return gradient

    for text in ("mean", "complex64"):
        with pytest.raises(ConfigError, match=text):
            Fails.apply(torch.ones(1, requires_grad=True)).backward()
        buckets.reverse()
