"""What a backward pass raises when several of its buckets fail, and what states refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reducer.errors import ConfigError

torch = pytest.importorskip("torch", reason="needs torch")

from worker_client.ddp import ReductionState, state_of  # noqa: E402 (it imports torch)

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


def test_residuals_are_loaded_by_name_and_in_the_parameters_memory_format(client: Client) -> None:
    net = torch.nn.Conv2d(3, 5, 2, bias=False).to(memory_format=torch.channels_last)
    state = ReductionState(client, named_parameters=net.named_parameters())
    assert state.state_dict() == {"residuals": {}}
    kept = torch.arange(60.0).reshape(5, 3, 2, 2)
    state.load_state_dict({"residuals": {"weight": kept}})
    (loaded,) = state.state_dict()["residuals"].values()
    assert loaded.stride() == net.weight.stride() != kept.stride()
    assert torch.equal(loaded, kept)
    assert loaded.data_ptr() != kept.data_ptr()
    state.load_state_dict({"residuals": {}})
    assert state.state_dict() == {"residuals": {}}


@pytest.mark.parametrize(
    ("residuals", "said"),
    [
        ({"weight": torch.zeros(2, 2)}, "'weight' have the shape (2, 2), the parameter has (4, 2)"),
        ({"other": torch.zeros(4, 2)}, "'other', which is no parameter here"),
    ],
    ids=["another shape", "another name"],
)
def test_residuals_of_another_model_are_refused(
    client: Client, residuals: dict[str, torch.Tensor], said: str
) -> None:
    net = torch.nn.Linear(2, 4)
    state = ReductionState(client, named_parameters=net.named_parameters())
    with pytest.raises(ConfigError) as error:
        state.load_state_dict({"residuals": residuals})
    assert said in str(error.value)


def test_what_needs_names_or_an_attached_model_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="named_parameters="):
        ReductionState(client, exclude=lambda *_: True)
    with pytest.raises(ConfigError, match="attach"):
        state_of(torch.nn.Linear(2, 2))
