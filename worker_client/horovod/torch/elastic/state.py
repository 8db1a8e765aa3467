"""The state of an elastic training with PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch

from worker_client.horovod.common.elastic import ObjectState
from worker_client.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """The state of a training with PyTorch, whose parts are its attributes.

    Args:
        model: its parameters and buffers are kept, restored and sent.
        optimizer: so is its state.
        **kwargs: further parts. An object with ``state_dict`` and ``load_state_dict``, such as
            another model, a scheduler or an `ElasticSampler`, stays the same object and loads the
            state; any other object is replaced by the one that was saved or received.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._stateful = [name for name, one in given.items() if hasattr(one, "load_state_dict")]
        for name in self._stateful:
            setattr(self, name, given[name])
        super().__init__(**{name: one for name, one in given.items() if name not in self._stateful})
        self._saved_states: dict[str, Any] = {}
        self._save_stateful()

    def save(self) -> None:
        """Keep everything as it is now."""
        self._save_stateful()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name in self._stateful:
            # A copy: optimizers keep the tensors that they load.
            getattr(self, name).load_state_dict(copy.deepcopy(self._saved_states[name]))
        super().restore()

    def sync(self) -> None:
        """Give every rank what rank 0 has now, and save it."""
        for name in self._stateful:
            one = getattr(self, name)
            if isinstance(one, torch.nn.Module):
                broadcast_parameters(one.state_dict(), root_rank=0)
            elif isinstance(one, torch.optim.Optimizer):
                broadcast_optimizer_state(one, root_rank=0)
            else:
                one.load_state_dict(self._bcast_object(one.state_dict()))
        super().sync()
        self._save_stateful()

    def _save_stateful(self) -> None:
        self._saved_states = {
            name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._stateful
        }
