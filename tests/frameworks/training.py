"""Runs an example at every rank, as a user would, and reads what the ranks say at their end.

Every example prints one line per rank: ``rank 0: loss 0.12345678, weights 0123456789abcdef, 4096
bytes reduced``, with the loss over all data and a fingerprint of the weights. With ``--stock`` it
trains over what its framework uses otherwise, and reduces nothing through reducers.
"""

import re
from typing import NamedTuple

import pytest

from tests.ranks import ROOT, environments, ranks
from worker_client.commands.demo.ranks import free_port

# What a rank says whose interpreter ends while a thread of Gloo lets go of the last work (PyTorch's
# pull request 179291): every tenth run of a busy machine, with nothing of ours imported.
GLOO_AT_EXIT = "terminate called without an active exception"
STOCK_ATTEMPTS = 3

LINE = re.compile(r"rank (\d+): loss (\S+), weights (\w{16}), (\d+) bytes reduced")
TOLERANCE = 1e-5
OF_A_LAUNCHER = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class End(NamedTuple):
    """What a rank has come to."""

    rank: int
    loss: float
    weights: str
    bytes_reduced: int


def unlaunched(environment):
    """Return what a program finds that no launcher has started."""
    return {name: text for name, text in environment.items() if name not in OF_A_LAUNCHER}


def train(example, *arguments, servers=(), workers=2, timeout_s=280.0, **environment):
    """Run ``examples/EXAMPLE ARGUMENTS`` under torchrun, and return the ranks' ends in order.

    Without servers and ``--stock`` the job is embedded.
    """
    attempts = STOCK_ATTEMPTS if "--stock" in arguments else 1
    while True:
        command = [
            *("-m", "torch.distributed.run"),
            *("--nproc-per-node", str(workers), "--master-port", str(free_port())),
            *(ROOT / "examples" / example, *arguments),
        ]
        attempts -= 1
        with ranks(environments(1, servers, **environment), *command, fresh=True) as launcher:
            try:
                (said,) = launcher.outputs(timeout_s)
                break
            except AssertionError as error:
                if attempts == 0 or GLOO_AT_EXIT not in str(error):
                    raise
    ends = sorted(
        End(int(rank), float(loss), weights, int(reduced))
        for rank, loss, weights, reduced in LINE.findall(said)
    )
    assert [end.rank for end in ends] == list(range(workers)), said
    return ends


def assert_alike(ours, stock):
    """Check that reducers trained all ranks alike to the bit, and as the stock backend does."""
    assert len({end.weights for end in ours}) == 1, ours
    assert all(end.bytes_reduced > 0 for end in ours), ours
    assert all(end.bytes_reduced == 0 for end in stock), stock
    for end, other in zip(ours, stock, strict=True):
        assert end.loss == pytest.approx(other.loss, rel=TOLERANCE)
