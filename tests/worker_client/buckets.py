"""A bucket, as DDP gives it to its communication hook."""

from dataclasses import dataclass

import torch


@dataclass
class Bucket:
    """A bucket of one gradient, of a parameter that is itself unless another one is named."""

    gradient: torch.Tensor
    last: bool = True
    of: torch.Tensor | None = None

    def buffer(self):
        return self.gradient

    def parameters(self):
        return [self.gradient if self.of is None else self.of]

    def is_last(self):
        return self.last
