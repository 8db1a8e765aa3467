"""Each fault of the proxy does to real sockets what it says, and no more."""

import select
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.faults.proxy import Proxy

BOTH_WAYS = pytest.mark.parametrize("way", ["up", "down"])
RAMP = bytes(range(256)) * 4096  # 1 MiB
FLIPPED = bytearray(RAMP[:150_000])
FLIPPED[100_000] ^= 0x40
QUIET_S = 0.1  # that nothing comes cannot be waited for


@pytest.fixture
def ends():
    """A proxy, the listening reducer behind it, and what makes connections through it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = stack.enter_context(Proxy(f"127.0.0.1:{listener.getsockname()[1]}"))

        def dial():
            host, _, port = proxy.address.rpartition(":")
            return stack.enter_context(socket.create_connection((host, int(port)), 2))

        def answer():
            accepted = stack.enter_context(listener.accept()[0])
            accepted.settimeout(2)
            return accepted

        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that much is on its way
        listener.settimeout(2)
        yield SimpleNamespace(listener=listener, proxy=proxy, dial=dial, answer=answer)


def pair(ends, way):
    """Return who sends in that direction over a new connection, and who receives."""
    worker, reducer = ends.dial(), ends.answer()
    return (worker, reducer) if way == "up" else (reducer, worker)


def receive(source, nbytes):
    data = bytearray()
    while len(data) < nbytes and (more := source.recv(nbytes - len(data))):
        data += more
    return bytes(data)


def passes(sender, receiver):
    sender.sendall(b"ping")
    return receive(receiver, 4) == b"ping"


def is_quiet(source):
    return not select.select([source], [], [], QUIET_S)[0]


@BOTH_WAYS
@pytest.mark.parametrize(
    ("shots", "sent", "came"),
    [
        ([("cut", 300_000)], RAMP[:300_100], RAMP[:300_000]),
        ([("flip", 100_000, {"amount": 6})], RAMP[:150_000], FLIPPED),
        ([("flip", 1, {"after": b"magic"})], b"magic-a", b"magic-`"),
        ([("flip", 5), ("duplicate", 3, {"amount": 2}), ("cut", 7)], b"abcdefgh", b"abcbcdegg"),
    ],
    ids=["torn", "flipped", "flipped after", "several"],
)
def test_one_connection_is_hit_where_it_was_aimed(ends, way, shots, sent, came):
    sender, receiver = pair(ends, way)
    bystander = pair(ends, way)
    assert passes(sender, receiver)
    fired = [ends.proxy.shoot(way, *shot[:2], **dict(*shot[2:])) for shot in shots]
    sender.sendall(sent)
    assert receive(receiver, len(came)) == came
    assert all(one.wait(20) for one in fired)
    if shots[-1][0] == "cut":
        for end in (receiver, sender):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    assert passes(*bystander)


@BOTH_WAYS
def test_a_partition_holds_bytes_ends_and_new_connections_until_it_heals(ends, way):
    sender, receiver = pair(ends, way)
    ends.proxy.set(way, parted=True)
    sender.sendall(b"held")
    assert passes(receiver, sender)
    sender.close()
    worker = ends.dial()
    worker.sendall(b"ping")
    assert all(is_quiet(one) for one in (receiver, worker, ends.listener))
    ends.proxy.set(way, parted=False)
    assert receive(receiver, 4) == b"held"
    assert receiver.recv(1) == b""
    assert receive(ends.answer(), 4) == b"ping"
