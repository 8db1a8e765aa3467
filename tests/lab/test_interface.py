"""Ranks on hosts with two networks: reducers that ranks host listen in the one that was chosen."""

import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab

pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.extended("tests/worker_client/test_interfaces.py")

ROOT = Path(__file__).parent.parent.parent
# What ranks meet by is told each of them, the reducers' addresses are printed.
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


def met(lab, tmp_path, **settings):
    """Let ranks meet, and return where their reducers were, by method."""
    started = []
    for host in lab.hosts:
        # As Debian's installer writes them: each host knows itself by a loopback address.
        known = {each.name: each.address for each in lab.hosts} | {host.name: "127.0.1.1"}
        lines = [f"{address} {name}\n" for name, address in known.items()]
        (tmp_path / host.name).write_text("127.0.0.1 localhost\n" + "".join(lines))
        bound = f'mount --bind "{tmp_path / host.name}" /etc/hosts && exec "$@"'
        environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", **settings}
        started.append(
            host.start(
                ["sh", "-c", bound, "sh", sys.executable, "-c", MEET],
                env={**environment, "RANK": str(host.index)},
                stdout=PIPE,
            )
        )
    said = [rank.communicate(timeout=100)[0].splitlines() for rank in started]
    assert [rank.returncode for rank in started] == [0, 0]
    assert said[0] == said[1]
    return [[one.rpartition(":")[0] for one in line.split()] for line in said[0]]


def add_address(host, address, *options):
    command = ["ip", "address", "add", address, "dev", "eth0", *options]
    assert host.start(command).wait(10) == 0


def test_embedded_reducers_use_the_network_that_was_chosen(namespaces, tmp_path):
    with Lab(2) as lab:
        for host in lab.hosts:
            add_address(host, f"10.78.0.{host.index + 1}/24")
        places = met(
            lab,
            tmp_path,
            METHODS=f"tcp://{lab.hosts[0].address}:29511",
            REDUCTION_INTERFACE="10.78.0.0/24",
        )
    assert places == [["10.78.0.1", "10.78.0.2"]]


def test_hosts_that_are_loopback_to_themselves_and_ipv6(namespaces, tmp_path):
    """The second method is by a name, as Debian's hosts call themselves."""
    with Lab(2) as lab:
        for host in lab.hosts:
            add_address(host, f"fd77::{host.index + 1}/64", "nodad")
        first, second = lab.hosts
        by = f"tcp://{first.address}:29512 tcp://{first.name}:29513 tcp://[fd77::1]:29514"
        places = met(lab, tmp_path, METHODS=by)
        ipv4 = [first.address, second.address]
    assert places == [ipv4, ipv4, ["[fd77::1]", "[fd77::2]"]]
