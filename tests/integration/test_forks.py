"""A forked child keeps no connection of its parent, so that others hear of the parent's death."""

import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from reducer.errors import LocalProtocolError
from tests.conftest import joined, local_pool, reducer_here
from tests.ranks import environments, ranks
from tests.waits import eventually
from worker_client.client import client as client_module
from worker_client.runtime import service_thread
from worker_client.staging.host_buffer import host_buffer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def connections(ports):
    """How many sockets of this process lead to these ports."""
    return sum(
        bool(one.raddr) and one.raddr.port in ports
        for one in psutil.Process().net_connections("tcp")
    )


def test_a_forked_child_is_refused_though_a_thread_was_in_the_middle_of_a_call(monkeypatch):
    with local_pool(1) as servers, joined(1, servers=servers) as (client,):
        held, over = threading.Event(), threading.Event()

        def take_long(data):
            held.set()
            over.wait(20)
            return host_buffer(data)

        monkeypatch.setattr(client_module, "host_buffer", take_long)
        thread = threading.Thread(target=client.all_reduce, args=(np.ones(4), "sum"))
        thread.start()
        assert held.wait(20)
        child = os.fork()
        if not child:
            signal.alarm(5)  # ends it if it hangs
            try:
                client.all_reduce(np.ones(4), "sum")
            except LocalProtocolError:
                os._exit(0)
            os._exit(1)
        over.set()
        thread.join(20)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("threads", "streams"), [(3, 1), (1, 3)])
def test_a_forked_child_closes_its_copies_and_no_other_socket(monkeypatch, threads, streams):
    """A reducer's further threads, and a link's further streams, are not known at the start."""
    monkeypatch.setenv("REDUCTION_STREAMS", str(streams))
    with (
        reducer_here(threads=threads) as server,
        joined(2, servers=[server.address]) as clients,
    ):
        ports = {int(lane.rpartition(":")[2]) for lane in server.lanes}
        made = 2 * threads * streams
        eventually(lambda: connections(ports) == made)
        ours, theirs = socket.socketpair()
        child = os.fork()
        if not child:
            try:
                clients[0].all_reduce(np.ones(4), "sum")
            except LocalProtocolError as error:
                ours.sendall(f"{connections(ports)}, {error}".encode())
            clients[0].shutdown()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        theirs.settimeout(5)
        with ours, theirs:
            found, _, said = theirs.recv(500).decode().partition(", ")
        assert found == "0"
        assert "forked child" in said
        works = [client.all_reduce(np.ones(1000), "sum") for client in clients]
        assert all((work.wait(5) == 2).all() for work in works), "the parent has its own"


@contextmanager
def forked_child():
    """A child that lives as long as the context."""
    ended, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    yield
    os.close(end)
    os.close(ended)
    os.waitpid(child, 0)


def test_a_forked_child_closes_its_copies_though_an_owner_was_just_closing_others():
    class Owner:
        """Of sockets that a forked child is not to keep."""

    def fails(_):
        raise RuntimeError("in the middle of a change")

    owners = [Owner() for _ in range(3)]
    here, there = socket.socketpair()
    closed = socket.socket()
    closed.close()
    holds = lambda _: [closed.fileno(), here.fileno()]  # noqa: E731
    for owner, its in zip(owners, (fails, holds, fails), strict=True):
        service_thread.close_in_child(owner, its)
    with forked_child(), there:
        here.close()
        there.settimeout(5)
        assert there.recv(1) == b"", "the child has a copy"


EMBEDDED = """
import os, sys
import psutil, torch.distributed as dist
import worker_client

dist.init_process_group("gloo")
client = worker_client.init()
port = int(client.spec.reducers[0].rpartition(":")[2])

def found():
    ends = [(one.laddr, one.raddr) for one in psutil.Process().net_connections("tcp")]
    return sum(any(end and end.port == port for end in both) for both in ends)

print(found() > 0, flush=True)
if not os.fork():
    print(found(), flush=True)
    os._exit(0)
os.wait()
client.shutdown()
"""


def test_a_forked_child_closes_its_copies_of_what_its_parents_reducer_has():
    with ranks(environments(1), "-c", EMBEDDED) as job:
        assert job.outputs() == ["True\n0\n"]
