"""Real sockets on both sides of a proxy, and what can be said of them."""

import select
import socket
import threading
from contextlib import ExitStack

import pytest

from tests.faults.proxy import Proxy

RAMP = bytes(range(256)) * 4096  # 1 MiB
QUIET_S = 0.1  # that nothing comes cannot be waited for


class Ends:
    """A proxy, the listening reducer behind it, and connections through it."""

    def __init__(self):
        self.stack = ExitStack()
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(2)
        self.proxy = self.stack.enter_context(Proxy(f"127.0.0.1:{self.listener.getsockname()[1]}"))

    def dial(self):
        host, _, port = self.proxy.address.rpartition(":")
        return self.stack.enter_context(socket.create_connection((host, int(port)), 2))

    def answer(self):
        accepted, _ = self.listener.accept()
        accepted.settimeout(2)
        return self.stack.enter_context(accepted)

    def pair(self, way="up"):
        """A new connection's ends: who sends in that direction, and who receives."""
        worker, reducer = self.dial(), self.answer()
        return (worker, reducer) if way == "up" else (reducer, worker)


def receive(source, nbytes):
    data = bytearray()
    while len(data) < nbytes and (more := source.recv(nbytes - len(data))):
        data += more
    return bytes(data)


def passes(sender, receiver, data=b"ping"):
    sender.sendall(data)
    return receive(receiver, len(data)) == data


def is_quiet(source):
    return not select.select([source], [], [], QUIET_S)[0]


def is_reset(source):
    with pytest.raises(ConnectionResetError):
        source.recv(1)
    return True


def is_over(source):
    try:
        return source.recv(1) == b""
    except ConnectionResetError:
        return True


def in_background(call):
    thread = threading.Thread(target=call)
    thread.start()
    return thread
