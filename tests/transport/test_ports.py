"""Who knows the buffer of a switch's port has the others send no more at once than fits into it.

What a sender may have under way its own kernel knows, from TCP's header.
"""

import socket
import struct
import time

import pytest

from reducer import tcp_connections
from reducer.engine.limits import ConnectionLimits
from reducer.runtime.guard import LOOK_S
from tests.transport.scripted import CHUNK, MIB, ramp

PORT = MIB // 2
OF_TWO_RANKS = int(0.9 * PORT) // 2
SEND_WINDOW = 228  # of struct tcp_info
LARGER = 2 * OF_TWO_RANKS  # what Linux allows by itself is more after some megabytes


def send_window(sender):
    """Return what a socket's peer lets it have under way, bytes."""
    info = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SEND_WINDOW + 4)
    if len(info) < SEND_WINDOW + 4:
        pytest.skip("the kernel does not tell: Linux 6.2 does")
    return struct.unpack_from("@I", info, SEND_WINDOW)[0]


def contributed(post):
    """Return what a member may have under way after it has sent megabytes."""
    member = post.member("job", window=64 * MIB)

    def send(first):
        for chunk in range(first, first + 16):
            member.contribute(0, bytes(CHUNK), chunk * CHUNK)

    for first in range(0, 640, 16):
        post.meanwhile(lambda at=first: send(at))
        post.step()
    return send_window(member.line.connection)


@pytest.mark.parametrize(
    "post", [ConnectionLimits(max_connections=9, hello_s=10.0, port_bytes=PORT)], indirect=True
)
def test_members_of_a_reducer_share_its_port(post):
    assert 0 < contributed(post) <= OF_TWO_RANKS


def test_a_reducer_that_knows_no_port_leaves_tcp_alone(post):
    assert contributed(post) > LARGER


@pytest.mark.parametrize("port", [PORT, 0])
def test_reducers_of_a_rank_share_its_port(joined, port):
    client, (reducer,) = joined(window=4 * MIB, port_bytes=port)
    until, seen = time.monotonic() + 20, 0
    while not (seen > LARGER if port == 0 else 0 < seen <= OF_TWO_RANKS):
        assert time.monotonic() < until, f"{seen} bytes may be under way"
        work = client.all_reduce(ramp(4 * MIB), op="max")
        reducer.serve(4 * MIB // CHUNK)
        work.wait(20)
        time.sleep(LOOK_S)  # a worker looks at its connections every 0.2 s
        work = client.all_reduce(ramp(4 * MIB), op="max")
        reducer.serve(4 * MIB // CHUNK)
        work.wait(20)
        seen = send_window(reducer.peer)


@pytest.mark.parametrize(
    ("ranks", "connections", "window"),
    [(64, 1, 14745), (64, 64, 14745), (4, 64, 14745), (1, 0, 943718), (1024, 16, 921)],
)
def test_a_port_is_shared_by_ranks_and_by_connections(ranks, connections, window):
    assert tcp_connections.Port(MIB, ranks).window(connections) == window


def test_a_far_connection_is_left_alone_and_one_that_has_ended(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        given = clamp(one)
        with monkeypatch.context() as far:
            far.setattr(tcp_connections, "FAR_S", 0.0)
            tcp_connections.bound(one, MIB)
        assert clamp(one) == given
        tcp_connections.bound_descriptor(one.fileno(), MIB)
        assert clamp(one) == MIB
        one.close()
        tcp_connections.bound(one, MIB)
        tcp_connections.bound_descriptor(-1, MIB)


def clamp(connection):
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)
