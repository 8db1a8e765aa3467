"""Reducers and workers as processes of their own, with failpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reducer.pool import READY

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVE = ["-m", "reducer", "serve", "--bind", "tcp://127.0.0.1:0", "--log-level", "error"]
# Rank 0 of 2: all-reduces of 3 chunks of ones, until it is told to stop by the end of its input.
WORK = """
import sys, numpy as np
from worker_client.startup import connect
with connect(rank=0, world_size=2, connect_timeout="500ms", timeout="300ms") as client:
    print("joined", flush=True)
    for _ in sys.stdin:
        print(client.all_reduce(np.ones(49152, np.float32), op="sum").wait(10)[0], flush=True)
"""


@contextmanager
def process(command: list[str], failpoints: str, **settings: str) -> Iterator[subprocess.Popen]:
    """A Python process with these settings, gone at the end."""
    given = {f"REDUCTION_{name.upper()}": value for name, value in settings.items()}
    environment = os.environ | given | {"REDUCTION_FAILPOINTS": failpoints}
    running = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def reducer(failpoints: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A running `reducer serve`, and its address."""
    with process(SERVE, failpoints) as running:
        assert running.stdout
        yield running, running.stdout.readline().removeprefix(READY).strip()


def worker(failpoints: str, servers: list[str], job: str) -> process:
    """A worker that makes an all-reduce for each line that it is sent, and says its first sum."""
    settings = {"servers": ",".join(servers), "job": job, "chunk_bytes": "64KiB"}
    return process(["-c", WORK], failpoints, **settings)
