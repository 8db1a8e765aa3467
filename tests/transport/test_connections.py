"""What the kernel tells of connections, and how one is ended."""

import socket
import time
from contextlib import ExitStack, suppress

import psutil
import pytest

from reducer import tcp_connections


@pytest.fixture
def pair():
    """Both ends of a connection: the client's and the server's."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=10))
        accepted = stack.enter_context(server.accept()[0])
        yield client, accepted


def traffic(descriptor):
    """What has passed over the connection that has this number now."""
    return tcp_connections.traffic(descriptor, tcp_connections.name(descriptor) or ())


def moved(descriptor):
    """Bytes read and written."""
    return traffic(descriptor)[:2]


def test_silence_is_since_the_latest_bytes_that_nobody_has_yet_to_read(pair):
    client, accepted = pair

    def silent_s():
        return traffic(accepted.fileno()).silent_s

    time.sleep(0.3)
    assert silent_s() >= 0.25
    client.sendall(b"x")
    time.sleep(1.0)
    assert silent_s() == 0.0, "what is late here is this process"
    accepted.recv(1)
    assert silent_s() >= 0.95
    client.sendall(b"x")
    accepted.recv(1)
    assert silent_s() < 0.95


def test_traffic_is_what_was_read_and_written(pair):
    client, accepted = pair
    client.sendall(b"x" * 1000)
    assert moved(accepted.fileno()) == (0, 0), "nothing was read yet"
    assert len(accepted.recv(600, socket.MSG_WAITALL)) == 600
    accepted.sendall(b"y" * 50)
    assert moved(accepted.fileno()) == (600, 50)


def test_what_the_kernel_holds_was_written(pair):
    _, accepted = pair
    accepted.setblocking(False)
    written = 0
    with suppress(BlockingIOError):  # when the client's buffer is full, and the server's
        while True:
            written += accepted.send(bytes(1 << 16))
    assert moved(accepted.fileno()) == (0, written)


def test_an_ended_connection_is_at_its_end_for_both(pair):
    client, accepted = pair
    name = tcp_connections.name(accepted.fileno())
    assert name == (*accepted.getsockname(), *client.getsockname())
    assert tcp_connections.end(accepted.fileno(), name)
    assert client.recv(1) == accepted.recv(1) == b""


def test_another_connection_of_that_number_is_left_alone(pair):
    client, accepted = pair
    name = tcp_connections.name(accepted.fileno())
    assert name is not None
    assert tcp_connections.traffic(client.fileno(), name) is None
    assert not tcp_connections.end(client.fileno(), name)
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"


def test_what_is_no_connection_is_none(tmp_path):
    before = psutil.Process().num_fds()
    with (tmp_path / "file").open("wb") as file:
        for descriptor in (file.fileno(), 1 << 20) * 50:
            assert tcp_connections.name(descriptor) is None
            assert traffic(descriptor) is None
            assert not tcp_connections.end(descriptor, ("127.0.0.1", 1))
    assert psutil.Process().num_fds() < before + 50, "each of them kept one"
