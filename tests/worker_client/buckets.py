"""A bucket, as DDP gives it to its communication hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Bucket:
    """A bucket of one gradient, of a parameter that is itself unless another one is named."""

    gradient: torch.Tensor
    last: bool = True
    of: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def parameters(self) -> list[torch.Tensor]:
        return [self.gradient if self.of is None else self.of]

    def is_last(self) -> bool:
        return self.last
