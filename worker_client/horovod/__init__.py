"""Horovod's interfaces over reducers, by the names of its modules; by itself, that of PyTorch.

A script for Horovod runs unchanged but for its imports: ``import worker_client.horovod.torch as
hvd``, or, which is the same, ``import worker_client.horovod as hvd``. What calls mean, and what is
refused, is in ``docs/horovod.md``.
"""

from __future__ import annotations

from typing import Any

from worker_client.horovod.torch import *  # noqa: F403
from worker_client.horovod.torch import __all__  # noqa: F401

__version__ = "0.28.1"  # of Horovod, whose interfaces these are


def __getattr__(name: str) -> Any:
    if name == "run":
        raise AttributeError("hvd.run is not available: start the script with torchrun or mpirun")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
