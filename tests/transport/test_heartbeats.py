"""Heartbeats are sent by a thread of their own, and no peer's keeps the others waiting."""

import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from hostile.zmtp import COMMAND, frame
from reducer.wire.header import Header
from tests.transport.guarded import PING
from tests.transport.scripted import M, Reducer, meet
from tests.waits import eventually, within_s
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.spec import Heartbeats
from worker_client.runtime.transport import Transport

BUSY_S = 1.1  # of a program that holds the GIL, say; longer than the patience of most peers


def unread(peer):
    """Return the bytes that the peer has sent so far."""
    peer.setblocking(False)
    found = bytearray()
    with suppress(BlockingIOError):
        while received := peer.recv(1 << 20):
            found += received
    return bytes(found)


@pytest.fixture
def connected():
    """A worker's transport, and the reducer's end of its connection."""
    flight = CompiledFlight(Header(M.HELLO))
    made = Transport(flight, heartbeats=Heartbeats(0.1, 60.0))
    with closing(made) as transport, closing(Reducer()) as reducer:
        flight.add_link(1 << 30, retain=False)
        transport.connect(reducer.address)
        meet(transport, reducer)
        transport.wait(0)
        yield transport, reducer.peer


def test_a_worker_is_heard_while_nobody_runs_its_loop(connected):
    _, peer = connected
    unread(peer)
    time.sleep(BUSY_S)
    assert unread(peer).count(PING) >= 5


def test_a_worker_with_much_to_send_is_heard_while_nobody_runs_its_loop(connected):
    transport, peer = connected
    for _ in range(64):
        transport.send(0, Header(M.PING).pack(), bytes(1 << 20))
    for _ in range(5):
        assert unread(peer), "the kernel has room, and nobody has given it more"
        time.sleep(BUSY_S / 5)


def test_each_of_many_is_heard_while_nobody_runs_the_loop(post):
    """They are sent a few at a time, so that data need not wait for all."""
    peers = [post.stranger() for _ in range(150)]
    for peer in peers:
        unread(peer)
    said = [b""] * len(peers)

    def heard():
        said[:] = [before + unread(peer) for before, peer in zip(said, peers, strict=True)]
        return min(text.count(PING) for text in said) >= 3

    eventually(heard)


def test_who_is_sent_something_is_sent_no_heartbeats_besides(post):
    peer = post.stranger()
    unread(peer)
    received, end = b"", time.monotonic() + BUSY_S
    while time.monotonic() < end:  # more often than heartbeats are due
        peer.sendall(frame(PING, COMMAND))
        post.step()
        time.sleep(0.02)
        received += unread(peer)
    assert received.count(b"PONG") > 10
    assert received.count(PING) <= 1, "an answer is a sign of life"
    time.sleep(BUSY_S / 2)
    assert unread(peer).count(PING) >= 1


def test_pings_without_end_keep_nobody_waiting(post):
    worker = post.member("job")
    flood = frame(PING, COMMAND) * 100_000
    stop = threading.Event()

    def ping():
        with suppress(OSError):  # it was told to go
            while not stop.is_set():
                worker.line.connection.sendall(flood)

    threads = [threading.Thread(target=ping) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            begun = time.monotonic()
            post.step()
            within_s(10.0, begun, "no other peer is served")
    finally:
        stop.set()
        with suppress(OSError):
            worker.line.connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
