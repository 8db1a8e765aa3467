"""Ranks on hosts with two networks: reducers that ranks host listen in the one that was chosen."""

import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab

pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.extended("tests/worker_client/test_interfaces.py")

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


def test_embedded_reducers_use_the_network_that_was_chosen(namespaces):
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


# Each is where ranks meet: the first by torch's documentation, with no MASTER_ADDR; the second as
# Debian's hosts call themselves; and one of IPv6.
MEET = """
import os, numpy, torch.distributed as dist, worker_client
for method in os.environ["METHODS"].split():
    dist.init_process_group("gloo", method, rank=int(os.environ["RANK"]), world_size=2)
    client = worker_client.init()
    x = numpy.ones(100_000, numpy.float32)
    client.all_reduce(x, op="sum").wait()
    assert (x == 2).all()
    print(*client.spec.reducers)
    dist.barrier()
    client.shutdown()
    dist.destroy_process_group()
"""


def test_hosts_that_are_loopback_to_themselves_and_ipv6(namespaces, tmp_path):
    with Lab(2) as lab:
        first, second = lab.hosts
        for host in lab.hosts:
            # As Debian's installer writes them: each host knows itself by a loopback address.
            known = {each.name: each.address for each in lab.hosts} | {host.name: "127.0.1.1"}
            lines = [f"{address} {name}\n" for name, address in known.items()]
            (tmp_path / host.name).write_text("127.0.0.1 localhost\n" + "".join(lines))
            ipv6 = ["ip", "address", "add", f"fd77::{host.index + 1}/64", "dev", "eth0", "nodad"]
            assert host.start(ipv6).wait(10) == 0
        common = {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "METHODS": f"tcp://{first.address}:29512 tcp://{first.name}:29513 tcp://[fd77::1]:29514",
        }
        bound = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
        started = [
            host.start(
                ["sh", "-c", bound, "sh", str(tmp_path / host.name), sys.executable, "-c", MEET],
                env={**common, "RANK": str(host.index)},
                stdout=PIPE,
            )
            for host in lab.hosts
        ]
        said = [rank.communicate(timeout=100)[0].splitlines() for rank in started]
        assert [rank.returncode for rank in started] == [0, 0]
        assert said[0] == said[1]
        places = [[one.rpartition(":")[0] for one in line.split()] for line in said[0]]
        ipv4 = [first.address, second.address]
        assert places == [ipv4, ipv4, ["[fd77::1]", "[fd77::2]"]]
