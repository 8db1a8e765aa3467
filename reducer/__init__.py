"""CPU-only reducers: they sum the gradient shards of all workers of a job and send the sum back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reducer.pool import local_pool

__all__ = ["local_pool"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Looked up on first use: `worker_client` imports this package for the protocol alone.
    if name == "local_pool":
        return import_module("reducer.pool").local_pool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
