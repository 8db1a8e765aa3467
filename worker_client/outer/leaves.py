"""DiLoCo whose workers are leaves: outer steps with the same bits for any number of ranks.

    outer = OuterLeaves(model, optimizer, 8, seed=1)      # 8 workers, dealt among the ranks
    for number in range(rounds):
        for worker in outer.round(number):                # those of this rank
            for step in range(every):
                ...                                       # the worker trains by itself

Each worker trains from the outer parameters, with its own state of the optimizer and random numbers
of its own. The pseudo-gradients' mean is a tree over the workers (docs/leaves.md), and the outer
step that of `worker_client.outer.OuterOptimizer`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from reducer.errors import ConfigError
from worker_client.collectives import broadcast
from worker_client.leaves import LeafStep, Leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from worker_client.client.client import Client


class OuterLeaves:
    """Makes outer steps with the mean of what workers have learned, of which a rank has several.

    Every rank makes one when its model is complete, which gives it rank 0's parameters. The outer
    ones and their momentum are kept in host memory as float32; of the optimizer's state there is
    one for each worker of this rank, and a copy.

    Args:
        model: whose parameters that require a gradient are averaged.
        optimizer: of the model's, which has made no step yet. Each worker has a state of its own:
            so set learning rates by the number of the step, as a schedule counts all workers'.
        count: workers of the job; one for each rank at least.
        lr, momentum: of the outer steps.
        seed: of the workers' random numbers; the same at every rank.
        client: the one to use; `worker_client.init()`'s by default.

    Attributes:
        lr, momentum: as given, and may be changed between two rounds, at all ranks alike.

    Raises:
        ConfigError: as `Leaves`; or ranks may be lost, and workers' states with them.
        ReductionError: as `Client.all_reduce`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        count: int,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        seed: int = 0,
        client: Client | None = None,
    ) -> None:
        self.lr, self.momentum = lr, momentum
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        outer = copy.deepcopy(model).to("cpu", torch.float32)
        self._leaves = Leaves(outer, count, seed=seed, client=client)
        if self._leaves.client.spec.elastic:
            raise ConfigError(
                "workers' optimizers have states, which are lost with their rank: leave out "
                "REDUCTION_ON_RANK_LOST=continue, and load a checkpoint when one is lost"
            )
        self._outer = [one for one in outer.parameters() if one.requires_grad]
        self._velocity = [torch.zeros_like(one) for one in self._outer]
        self._optimizer = optimizer
        self._first = copy.deepcopy(optimizer.state_dict())
        self._states: dict[int, dict[str, Any]] = {}  # of the optimizer, by worker
        for one in self._outer:
            broadcast(self._leaves.client, one.detach())
        self._go_on()

    def round(self, number: int) -> Iterator[int]:
        """Give the workers of this rank, each of which trains then; and make an outer step.

        When it has failed, all ranks may make it again.

        Args:
            number: of the round, for the workers' random numbers.

        Raises:
            ConfigError: the state of a worker is missing among those loaded.
            ReductionError: as `worker_client.leaves.LeafStep.reduce`.
        """
        step, states = LeafStep(self._leaves, number), {}
        for worker in step:
            if self._states and worker not in self._states:
                raise ConfigError(f"load the states of all ranks: worker {worker}'s is missing")
            self._go_on()
            # A copy, as the optimizer goes on in what it loads.
            state = copy.deepcopy(self._states.get(worker, self._first))
            self._optimizer.load_state_dict(state)
            yield worker
            states[worker] = self._optimizer.state_dict()
            for outer, own in zip(self._outer, self._parameters, strict=True):
                # From what the worker went on from: the outer parameter, rounded to its own type.
                begun = outer.detach().to(own.dtype).to(outer.dtype)
                outer.grad = begun - own.detach().to(outer)
        step.reduce()
        self._states = states
        self._make_step()
        self._go_on()

    @torch.no_grad()
    def _make_step(self) -> None:
        # Products and sums one by one, as `Fragment._make_step` does, and for its reason.
        for outer, velocity in zip(self._outer, self._velocity, strict=True):
            assert outer.grad is not None
            velocity.mul_(self.momentum).add_(outer.grad)
            outer.sub_(outer.grad.add_(velocity * self.momentum).mul_(self.lr))

    @torch.no_grad()
    def _go_on(self) -> None:
        """Have the model go on from the outer parameters."""
        for outer, own in zip(self._outer, self._parameters, strict=True):
            own.copy_(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank's part of a checkpoint needs, between two rounds."""
        common = [one.detach().clone() for one in (*self._outer, *self._velocity)]
        return {"common": common, "lr": self.lr, "momentum": self.momentum, "states": self._states}

    @torch.no_grad()
    def load_state_dicts(self, parts: Iterable[dict[str, Any]]) -> None:
        """Go on from what `state_dict` has returned at every rank; of these there may be others."""
        for part in parts:
            self.lr, self.momentum = part["lr"], part["momentum"]
            self._states |= part["states"]
            for mine, one in zip((*self._outer, *self._velocity), part["common"], strict=True):
                mine.copy_(one)
        self._go_on()
