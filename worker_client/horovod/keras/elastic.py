"""``hvd.elastic`` for Keras: its state, and callbacks that keep it up to date."""

from __future__ import annotations

from typing import Any

import keras

from worker_client.horovod.common.elastic import ObjectState, State
from worker_client.horovod.common.exceptions import HostsUpdatedInterrupt
from worker_client.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["KerasState", "ObjectState", "State", "TensorFlowKerasState"]
__all__ += ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
__all__ += ["HostsUpdatedInterrupt", "run"]


class KerasState(TensorFlowKerasState):
    """As `TensorFlowKerasState`, without `backend`."""

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state after each `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._each = self._left = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._left = self._each

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._left -= 1
        if self._left == 0:
            self._state.commit()
            self._left = self._each

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.batch`` the number of the current batch, and 0 between epochs.

    An epoch that begins with another number is not shortened: Keras 3 does not ask for the number
    of its steps again.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps ``state.epoch`` the number of epochs that were completed, over all calls of fit."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._before = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._state.epoch = self._before + epoch + 1
