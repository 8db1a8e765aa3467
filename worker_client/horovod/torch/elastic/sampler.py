"""Which samples of a dataset are whose, while ranks come and go."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from worker_client.horovod.job import CURRENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(Sampler[int]):
    """Divides a dataset among the ranks, and what is left of an epoch anew when they change.

    Make it part of a `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end
    of each epoch.

    Args:
        dataset: of any length, the same at every rank.
        shuffle: in an order that depends on the seed and the epoch alone.
        seed: of the order, the same at every rank.

    Attributes:
        epoch: the current one.
        processed_num: samples of it that all ranks together have processed.
        num_replicas: number of ranks at the latest `reset`.
        rank: this rank's number then.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed yet."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 (Horovod's)
        """Count a batch as processed: `batch_size` samples at this rank, and at each other one.

        That includes a rank that is lost, until the next commit: its samples since then are not
        seen in this epoch.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return what is to be kept."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take over what was kept, and divide what is left among the ranks that are there now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks that are there now."""
        self.num_replicas, self.rank = CURRENT.size(), CURRENT.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 (no secret)
        left = order[self.processed_num :]
        # All have equally many: the last ones are the first ones again.
        missing = -len(left) % self.num_replicas
        whole = left + (left * (missing // len(left) + 1))[:missing] if left else []
        self._mine = whole[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine[:])

    def __len__(self) -> int:
        return len(self._mine)
