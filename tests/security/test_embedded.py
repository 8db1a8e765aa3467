"""Ranks that host reducers beyond loopback give them keys by themselves."""

from __future__ import annotations

import socket

import pytest

from tests.ranks import environments, ranks

pytest.importorskip("torch", reason="needs torch")

RANK = """
import numpy, torch, torch.distributed as dist, worker_client
from reducer.errors import AuthError
from worker_client.runtime.zmtp_greeting import greet, split
from worker_client.client.bootstrap import connect
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
client = worker_client.init()
for step in range(10):
    works = [client.all_reduce(torch.full((100_000,), float(rank + step)), op="sum")]
    works += [client.all_reduce(torch.ones(10), op="sum", name=name) for name in "ab"]
    assert (works[0].wait(20) == n * (n - 1) / 2 + n * step).all()
    assert all((work.wait(20) == n).all() for work in works[1:])
reducers = client.spec.reducers
print(*(greet(*split(address), timeout_s=20).mechanism for address in reducers))
try:
    connect(servers=reducers, rank=0, world_size=1, embedded=False, job=f"x{rank}").shutdown()
    print("welcome")
except AuthError as error:
    assert "demands a key" in str(error)
    print("refused")
dist.barrier()
client.shutdown()
"""


def outputs(world_size: int, **settings: str) -> list[str]:
    """What every rank prints."""
    with ranks(environments(world_size, **settings), "-c", RANK) as job:
        return job.outputs(150)


@pytest.fixture
def exposed() -> dict[str, str]:
    """What makes embedded reducers listen beyond this machine."""
    try:
        socket.getaddrinfo(socket.gethostname(), 1)
    except OSError:
        pytest.skip("this machine's name cannot be resolved")
    return {"REDUCTION_BIND": "tcp://0.0.0.0:0"}


def test_what_others_can_reach_has_keys(exposed: dict[str, str]) -> None:
    said = outputs(2, **exposed, REDUCTION_THREADS="2")
    assert said == ["CURVE CURVE\nrefused\n"] * 2


def test_a_private_network_needs_none(exposed: dict[str, str]) -> None:
    assert outputs(2, **exposed, REDUCTION_INSECURE="1") == ["NULL NULL\nwelcome\n"] * 2


def test_nor_does_this_machine() -> None:
    assert outputs(2) == ["NULL NULL\nwelcome\n"] * 2
