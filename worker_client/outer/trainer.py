"""Outer steps between the steps of transformers' Trainer, of which each site has one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from reducer.errors import ConfigError
from worker_client.client.bootstrap import DEFAULT
from worker_client.outer import OuterOptimizer

if TYPE_CHECKING:
    from worker_client.client.client import Client


class OuterCallback(TrainerCallback):  # type: ignore[misc]
    """Counts a Trainer's steps, averages after its last one too, and is in its checkpoints.

    Each site adds it to its Trainer: ``trainer.add_callback(OuterCallback(trainer.model,
    every=50))``. Beside a checkpoint's files in `output_dir` is ``outer_RANK.pt``, of each site.

    Args:
        model: the Trainer's, which gets rank 0's parameters now.
        client, arguments: as of `OuterOptimizer`.

    Raises:
        ConfigError, ReductionError: as `OuterOptimizer`.
    """

    def __init__(
        self, model: torch.nn.Module, client: Client | None = None, **arguments: Any
    ) -> None:
        self._client = DEFAULT.get() if client is None else client
        self.outer = OuterOptimizer(model, self._client, **arguments)

    def on_train_begin(self, args: Any, state: Any, *_: object, **__: object) -> None:
        if args.world_size > 1 or args.load_best_model_at_end:
            raise ConfigError(
                "OuterCallback is for sites of one process each, which end with the same weights: "
                "start each with python, not torchrun, and leave out load_best_model_at_end"
            )
        if state.global_step:
            self.outer.load_state_dict(torch.load(self._path(args, state), weights_only=True))

    def on_step_end(self, *_: object, **__: object) -> None:
        self.outer.step()

    def on_save(self, args: Any, state: Any, *_: object, **__: object) -> None:
        torch.save(self.outer.state_dict(), self._path(args, state))

    def on_train_end(self, *_: object, **__: object) -> None:
        self.outer.finish()

    def _path(self, args: Any, state: Any) -> Path:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        return folder / f"outer_{self._client.rank}.pt"
