"""Ranks on hosts with two networks: reducers that ranks host listen in the one that was chosen."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab

pytest.importorskip("torch", reason="needs torch")

ROOT = Path(__file__).parent.parent.parent
SECOND = "10.78.0"  # the network besides the lab's
RANK = """
import numpy, psutil, torch.distributed as dist, worker_client
dist.init_process_group("gloo")
client = worker_client.init()
x = numpy.ones(100_000, numpy.float32)
client.all_reduce(x, op="sum").wait()
assert (x == 2).all()
dist.barrier()
for connection in psutil.Process().net_connections("tcp4"):
    if connection.status == psutil.CONN_LISTEN: print(connection.laddr.ip)
client.shutdown()
"""


def test_embedded_reducers_use_the_network_that_was_chosen(namespaces: None) -> None:
    with Lab(2) as lab:
        for host in lab.hosts:
            second = f"{SECOND}.{host.index + 1}/24"
            assert host.start(["ip", "address", "add", second, "dev", "eth0"]).wait(10) == 0
        common = {
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": lab.hosts[0].address,
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth0",
            "REDUCTION_INTERFACE": f"{SECOND}.0/24",
        }
        ranks = [
            host.start(
                [sys.executable, "-c", RANK], env={**common, "RANK": str(host.index)}, stdout=PIPE
            )
            for host in lab.hosts
        ]
        listening = [rank.communicate(timeout=100)[0].split() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert f"{SECOND}.1" in listening[0]
        assert f"{SECOND}.2" in listening[1]
