"""What the kernel tells of connections."""

import socket
from contextlib import ExitStack

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


def test_a_connection_has_a_name_and_a_round_trip(pair):
    client, accepted = pair
    name = tcp_connections.name(accepted.fileno())
    assert name == (*accepted.getsockname(), *client.getsockname())
    assert 0.0 < tcp_connections.round_trip_s(accepted) < 10.0
    assert tcp_connections.shortest_round_trip_s(accepted.fileno()) > 0.0


def test_what_is_no_connection_is_none(tmp_path):
    before = psutil.Process().num_fds()
    with (tmp_path / "file").open("wb") as file:
        for descriptor in (file.fileno(), 1 << 20) * 50:
            assert tcp_connections.name(descriptor) is None
            assert tcp_connections.shortest_round_trip_s(descriptor) == 0.0
    assert psutil.Process().num_fds() < before + 50, "each of them kept one"
