"""What a rank of a training tells the process that started it."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from harness.processes import say


def report(event: str, **values: Any) -> None:
    say({"event": event, "rank": dist.get_rank(), **values})


def digest(weights: Iterable[torch.Tensor]) -> str:
    fingerprint = hashlib.sha256()
    for tensor in weights:
        fingerprint.update(tensor.numpy().data)
    return fingerprint.hexdigest()
