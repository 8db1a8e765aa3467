"""What torchrun gives to every rank of a job on this machine."""

from __future__ import annotations

import os

from worker_client.demo.ranks import free_port


def rank_environment(world_size: int, **settings: str) -> dict[str, str]:
    """Return the environment of all ranks but for RANK, with a port that is free."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
