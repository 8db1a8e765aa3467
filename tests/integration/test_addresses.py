"""Where embedded reducers listen: IPv6, hosts whose own name is loopback, hosts without a way."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError
from tests.conftest import joined, local_pool, reducer_here
from tests.integration.calls import reduced
from tests.ranks import environments, ranks
from worker_client import config
from worker_client.client.bootstrap import enlist
from worker_client.client.client import Client
from worker_client.client.interfaces import addresses
from worker_client.client.rendezvous import Rendezvous
from worker_client.commands.demo.ranks import free_port

torch = pytest.importorskip("torch", reason="needs torch")

IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


def outcomes(interfaces, store_host=None, servers=((), ())):
    """Return the reducers of a job of embedded ranks, or what each rank raised instead.

    Args:
        interfaces: each rank's REDUCTION_INTERFACE.
        store_host: where the store is, which is in memory by default.
        servers: each rank's REDUCTION_SERVERS.
    """
    dist = torch.distributed
    store = dist.TCPStore(store_host, 0, is_master=True) if store_host else dist.HashStore()

    def join(rank):
        # A connection to such a store waits for one rank at a time.
        own = dist.TCPStore(store_host, store.port) if store_host else store
        group = Rendezvous(rank, range(len(interfaces)), own, timeout_s=20)
        try:
            its = {"interface": interfaces[rank], "servers": servers[rank]}
            settings = config.load().model_copy(update=its)
            return enlist(settings, group, (rank, len(interfaces)))
        except (ConfigError, MismatchError) as error:
            return error

    with ExitStack() as stack, ThreadPoolExecutor(len(interfaces), "host..") as pool:
        found = list(pool.map(join, range(len(interfaces))))
        clients = [stack.enter_context(each) for each in found if isinstance(each, Client)]
        if clients:
            results = reduced(clients, [np.full(1000, 1.0 + each.rank) for each in clients])
            assert all((result == 1.5).all() for result in results)
        return [each.spec.reducers if isinstance(each, Client) else each for each in found]


@pytest.fixture
def several_hosts(monkeypatch):
    """Have each thread be on a host of its own, whose name has no address."""
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)


def outside():
    """Return an address of this machine that others know."""
    there = [its[0] for name, its in addresses().items() if name != "lo"]
    if not there:
        pytest.skip("this machine has no network")
    return there[0]


@IPV6
def test_a_pool_at_an_ipv6_address():
    with (
        reducer_here(bind="tcp://[::1]:0", threads=2) as server,
        joined(2, servers=[server.address]) as clients,
    ):
        assert server.address.startswith("[::1]:")
        results = reduced(clients, [np.full(100_003, 1.0 + each.rank) for each in clients])
        assert all((result == 1.5).all() for result in results)


@pytest.mark.parametrize(
    ("interface", "address"), [("", "127.0.0.1"), pytest.param("::1", "[::1]", marks=IPV6)]
)
def test_embedded_reducers_of_one_host_listen_on_loopback(interface, address):
    for reducers in outcomes([interface, interface]):
        assert all(one.startswith(f"{address}:") for one in reducers)


HOROVOD = """
import torch, worker_client, worker_client.horovod.torch as hvd
client = worker_client.init()  # without a process group its job is named by where ranks meet
assert client.all_reduce(torch.ones(3), op="sum").wait(10).tolist() == [2] * 3
hvd.init()
print(hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum).tolist())
"""


@IPV6
def test_ranks_that_meet_at_an_ipv6_address():
    with (
        local_pool(1) as servers,
        ranks(
            environments(2, servers, MASTER_ADDR="::1", REDUCTION_JOB="at ::1"), "-c", HOROVOD
        ) as job,
    ):
        assert job.outputs() == ["[3.0, 3.0, 3.0]\n"] * 2


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize(
    ("interfaces", "store", "bind"),
    [
        # As rank 0's host sees itself where Debian has written its name beside 127.0.1.1.
        (["", "outside"], None, None),
        (["", "outside"], "127.0.0.1", None),
        (["", ""], "outside", None),
        (["", ""], "outside", "tcp://0.0.0.0:0"),
    ],
    ids=["no address", "loopback", "where ranks meet", "every address"],
)
def test_reducers_listen_on_the_way_to_the_other_hosts(monkeypatch, interfaces, store, bind):
    host = outside()
    if bind:
        monkeypatch.setenv("REDUCTION_BIND", bind)
    interfaces, store = [one and host for one in interfaces], host if store == "outside" else store
    for reducers in outcomes(interfaces, store):
        assert [address.rpartition(":")[0].strip("[]") for address in reducers] == [host] * 2


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize("interfaces", [["", ""], ["", "lo"], ["lo", ""]])
def test_loopback_is_refused_between_hosts_at_every_rank(interfaces):
    for error in outcomes(interfaces, "127.0.0.1"):
        assert isinstance(error, ConfigError)
        assert "other hosts cannot reach 127.0.0.1: set REDUCTION_INTERFACE" in str(error)


@pytest.mark.usefixtures("several_hosts")
def test_a_name_server_that_does_not_answer_is_named(monkeypatch):
    """Else it seems as if the way to where the ranks meet were loopback."""

    def resolve(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(Rendezvous, "host", "node-0.pool")
    for error in outcomes(["", ""]):
        assert "'node-0.pool', where the ranks meet, could not be resolved: Temporary" in str(error)
        assert "cannot reach" not in str(error)


@pytest.mark.usefixtures("several_hosts")
def test_a_bind_address_that_other_hosts_cannot_reach_is_refused(monkeypatch):
    monkeypatch.setenv("REDUCTION_BIND", "tcp://127.0.0.1:0")
    for error in outcomes(["", ""], outside()):
        assert "other hosts cannot reach 127.0.0.1" in str(error)


def test_a_rank_whose_port_is_taken_keeps_nobody_waiting(monkeypatch):
    port = free_port()
    monkeypatch.setenv("REDUCTION_BIND", f"tcp://127.0.0.1:{port}")
    errors = [str(error) for error in outcomes(["", ""])]
    late = errors.index(min(errors, key=len))
    assert str(port) in errors[late]
    assert errors[1 - late] == f"rank {late}: {errors[late]}"
    socket.create_server(("127.0.0.1", port)).close()  # the other rank listens no longer


def test_a_rank_that_uses_a_pool_beside_ranks_that_host_reducers():
    for error in outcomes(["", ""], servers=((), ("127.0.0.1:1",))):
        assert error.field == "REDUCTION_SERVERS"
        assert "rank 0 says one in every rank" in str(error)
        assert "rank 1 says the pool 127.0.0.1:1" in str(error)
