"""Horovod's callbacks for Keras: what all ranks do alike while `model.fit` runs."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import keras

from reducer.errors import ConfigError
from worker_client import keras as ours
from worker_client.horovod.job import CURRENT
from worker_client.horovod.tensorflow.functions import broadcast_variables

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

__all__ = ["BroadcastGlobalVariablesCallback", "MetricAverageCallback"]
__all__ += ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class BroadcastGlobalVariablesCallback(ours.BroadcastGlobalVariablesCallback):
    """Gives every rank the weights and optimizer state of rank `root_rank`.

    When training begins; of a model that is not built by then, after its first batch.

    Args:
        root_rank: the rank whose values they are to be.
        device: changes nothing.
        local_variables: one or several variables of the model that stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:  # noqa: ARG002
        several = isinstance(local_variables, (list, tuple)) or local_variables is None
        self._local = list(local_variables or ()) if several else [local_variables]
        self._late = False
        super().__init__(root_rank)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._late = not self.model.built
        if not self._late:
            super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if self._late:
            self._late = False
            super().on_train_begin(logs)

    def _broadcast(self, variables: list[Any]) -> None:
        local = {id(variable) for variable in self._local}
        broadcast_variables([one for one in variables if id(one) not in local], self._root)


class MetricAverageCallback(ours.MetricAverageCallback):
    """At the end of each epoch, replaces metrics by their means over all ranks.

    It stands in the list before callbacks that use them; `device` changes nothing.
    """

    def __init__(self, device: str = "") -> None:  # noqa: ARG002 (Horovod's)
        super().__init__()


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier`` from one epoch to another.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch; or a number, to the power of epochs since
            `start_epoch`.
        start_epoch: the first one that it is for.
        end_epoch: the first one that it is no longer for; None for none.
        staircase: whether it is set at the beginning of each epoch, of a whole number, or of each
            batch, of an epoch with a fraction.
        momentum_correction: is accepted, and a warning says once that it is not made: Keras 3 has
            the momentum in the graph of the step.
        steps_per_epoch: batches of an epoch, if Keras does not know that.

    Raises:
        ConfigError: there is no `initial_lr`; when training begins, the number of batches is not
            known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr= is needed: the learning rate that is to be multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._corrects = momentum_correction
        self._epoch = 0

    def multiplier(self, epoch: float) -> float:
        """Return what the learning rate is multiplied by."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    "Keras does not say how many batches an epoch has: give this callback "
                    "steps_per_epoch="
                )
        if self._corrects and getattr(self.model.optimizer, "momentum", None):
            self._corrects = False
            log.warning("the momentum is not corrected when the learning rate changes")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        after = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or after or (self.staircase and batch > 0):
            return
        epoch: float = self._epoch
        if not self.staircase:
            assert self.steps_per_epoch is not None
            epoch += batch / self.steps_per_epoch
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / hvd.size()`` to `initial_lr`, batch by batch.

    It takes `warmup_epochs` epochs; if `verbose` is 1, rank 0 says when it has ended. Other
    arguments are those of `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        given = 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        super().__init__(initial_lr, self._warmed, *given)
        self._warmup_epochs = warmup_epochs
        self._verbose = verbose

    def _warmed(self, epoch: float) -> float:
        assert self.steps_per_epoch is not None
        done = (epoch + 1.0 / self.steps_per_epoch) / self._warmup_epochs
        return (1.0 + done * (CURRENT.size() - 1)) / CURRENT.size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch == self._warmup_epochs - 1 and CURRENT.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            sys.stdout.write(f"\nEpoch {epoch + 1}: the learning rate is {rate:g}.\n")
