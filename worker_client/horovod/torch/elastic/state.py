"""The state of an elastic training with PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch

from worker_client.horovod.common.elastic import ObjectState
from worker_client.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """The state of a training with PyTorch, whose parts are its attributes.

    The parameters and buffers of `model`, the state of `optimizer` and further parts are kept,
    restored and sent. An object with ``state_dict`` and ``load_state_dict``, such as another model,
    a scheduler or an `ElasticSampler`, stays the same object and loads the state; any other object
    is replaced by the one that was saved or received.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given: dict[str, Any] = {"model": model, "optimizer": optimizer, **kwargs}
        self._stateful = [name for name, one in given.items() if hasattr(one, "load_state_dict")]
        for name in self._stateful:
            setattr(self, name, given.pop(name))
        super().__init__(**given)

    def restore(self) -> None:
        for name in self._stateful:
            # A copy: optimizers keep the tensors that they load.
            getattr(self, name).load_state_dict(copy.deepcopy(self._saved_states[name]))
        super().restore()

    def sync(self) -> None:
        for name in self._stateful:
            one = getattr(self, name)
            if isinstance(one, torch.nn.Module):
                broadcast_parameters(one.state_dict(), root_rank=0)
            elif isinstance(one, torch.optim.Optimizer):
                broadcast_optimizer_state(one, root_rank=0)
            else:
                one.load_state_dict(self._bcast_object(one.state_dict()))
        super().sync()

    def _keep(self) -> None:
        super()._keep()
        states = {name: getattr(self, name).state_dict() for name in self._stateful}
        self._saved_states = copy.deepcopy(states)
