"""Real sockets on both sides of a proxy, and what can be said of them."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from tests.faults.proxy import Proxy, Way

if TYPE_CHECKING:
    from collections.abc import Callable

RAMP = bytes(range(256)) * 4096  # 1 MiB
QUIET_S = 0.1  # that nothing comes cannot be waited for


class Ends:
    """A proxy, the listening reducer behind it, and connections through it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(2)
        self.proxy = self.stack.enter_context(Proxy(f"127.0.0.1:{self.listener.getsockname()[1]}"))

    def dial(self) -> socket.socket:
        host, _, port = self.proxy.address.rpartition(":")
        return self.stack.enter_context(socket.create_connection((host, int(port)), 2))

    def answer(self) -> socket.socket:
        accepted, _ = self.listener.accept()
        accepted.settimeout(2)
        return self.stack.enter_context(accepted)

    def pair(self, way: Way = "up") -> tuple[socket.socket, socket.socket]:
        """A new connection's ends: who sends in that direction, and who receives."""
        worker, reducer = self.dial(), self.answer()
        return (worker, reducer) if way == "up" else (reducer, worker)


def receive(source: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes and (more := source.recv(nbytes - len(data))):
        data += more
    return bytes(data)


def passes(sender: socket.socket, receiver: socket.socket, data: bytes = b"ping") -> bool:
    sender.sendall(data)
    return receive(receiver, len(data)) == data


def is_quiet(source: socket.socket) -> bool:
    return not select.select([source], [], [], QUIET_S)[0]


def is_reset(source: socket.socket) -> bool:
    with pytest.raises(ConnectionResetError):
        source.recv(1)
    return True


def is_over(source: socket.socket) -> bool:
    try:
        return source.recv(1) == b""
    except ConnectionResetError:
        return True


def send_until_it_blocks(sender: socket.socket) -> int:
    """Return how many bytes were taken before nothing was for a while."""
    sender.settimeout(0.3)
    sent = 0
    with suppress(TimeoutError):
        while True:
            sent += sender.send(RAMP)
    return sent


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread
