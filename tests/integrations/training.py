"""Runs an example at every rank, as a user would, and reads what the ranks say at their end.

Every example prints one line per rank: ``rank 0: loss 0.12345678, weights 0123456789abcdef, 4096
bytes reduced``, with the loss over all data and a fingerprint of the weights. With ``--stock`` it
trains over what its framework uses otherwise, and reduces nothing through reducers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from worker_client.demo.ranks import free_port

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"rank (\d+): loss (\S+), weights (\w{16}), (\d+) bytes reduced")
TOLERANCE = 1e-5


class End(NamedTuple):
    """What a rank has come to."""

    rank: int
    loss: float
    weights: str
    bytes_reduced: int


def train(
    example: str,
    *arguments: str,
    servers: list[str] | None = None,
    workers: int = 2,
    timeout_s: float = 280.0,
    **environment: str,
) -> list[End]:
    """Run ``examples/EXAMPLE ARGUMENTS`` under torchrun, and return the ranks' ends in order.

    Args:
        example: file name.
        arguments: the script's.
        servers: reducers to use; none given and no ``--stock`` makes an embedded job.
        workers: number of ranks.
        timeout_s: for all of it.
        environment: of the ranks, besides this process's.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("REDUCTION_")}
    if servers:
        environment["REDUCTION_SERVERS"] = ",".join(servers)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(workers), "--master-port", str(free_port())),
        *(str(ROOT / "examples" / example), *arguments),
    ]
    process = subprocess.Popen(
        command,
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said
    ends = sorted(
        End(int(rank), float(loss), weights, int(reduced))
        for rank, loss, weights, reduced in LINE.findall(said)
    )
    assert [end.rank for end in ends] == list(range(workers)), said
    return ends


def assert_alike(ours: list[End], stock: list[End]) -> None:
    """Check that reducers trained all ranks to the bit alike, and to what the stock backend does.

    Args:
        ours: through reducers.
        stock: the same script over its own backend.
    """
    assert len({end.weights for end in ours}) == 1, ours
    assert all(end.bytes_reduced > 0 for end in ours), ours
    assert all(end.bytes_reduced == 0 for end in stock), stock
    for end, other in zip(ours, stock, strict=True):
        assert end.loss == pytest.approx(other.loss, rel=TOLERANCE)
