"""A forked child keeps no connection of its parent, so that others hear of the parent's death."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import numpy as np
import psutil
import pytest

from reducer.errors import LocalProtocolError
from tests.conftest import joined, local_pool

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def connections() -> set[tuple[int, int]]:
    """Both ports of each connection that this process has a socket of."""
    return {
        (one.laddr.port, one.raddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.raddr
    }


def test_a_forked_child_is_refused_though_a_thread_was_in_the_middle_of_a_call() -> None:
    with local_pool(1) as servers, joined(1, servers=servers) as (client,):
        held, over = threading.Event(), threading.Event()

        def call() -> None:
            with client._order:
                held.set()
                over.wait(20)

        thread = threading.Thread(target=call)
        thread.start()
        held.wait(20)
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


@pytest.mark.usefixtures("impl")
def test_a_forked_child_closes_its_copies_and_no_other_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDUCTION_THREADS", "2")
    before = connections()
    with local_pool(2) as servers, joined(2, servers=servers) as clients:
        assert [client.lanes for client in clients] == [[2, 2]] * 2
        assert len(connections() - before) >= 8
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            ours.sendall(b"alive")  # in spite of the rest
            os.write(writer, b"%d" % len(connections() - before))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 10) == b"0"
        assert theirs.recv(5) == b"alive"
        works = [client.all_reduce(np.ones(1000), "sum") for client in clients]
        assert all((work.wait(5) == 2).all() for work in works), "the parent has its own"
        for descriptor in (reader, writer):
            os.close(descriptor)
        ours.close()
        theirs.close()
