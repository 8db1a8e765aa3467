"""The states of a connection: what happens to real ones is what the table says, and all of it."""

import errno
import socket
from contextlib import suppress
from select import EPOLLIN, EPOLLOUT, EPOLLRDHUP

import pytest

from tests.zmtp._connection import STATES, Connection, following
from tests.zmtp.test_codec import greeting, ready

HANDSHAKE = greeting() + ready(b"ROUTER")


class Side:
    """A client's connection, and its peer, which is a socket."""

    def __init__(self):
        self.sockets = socket.socketpair()
        ours, self.peer = self.sockets
        ours.setblocking(False)
        self.connection = Connection(ours)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.sockets:
            each.close()

    def hear(self, said=b"", events=EPOLLIN):
        with suppress(OSError):  # it has hung up
            self.peer.sendall(said)
        self.connection.note(events)

    def connect(self):
        self.connection.note(EPOLLOUT)

    def shake_hands(self):
        self.hear(HANDSHAKE)

    def hang_up(self):
        self.peer.close()
        self.connection.note(EPOLLIN | EPOLLRDHUP)

    def be_kept(self):
        self.connection.keep()
        self.hang_up()

    def resume(self):
        fresh = Side()
        fresh.connect()
        fresh.shake_hands()
        self.connection.splice(fresh.connection)
        self.sockets += fresh.sockets

    def break_(self):
        self.connection.break_(errno.ECONNRESET)

    def read_what_came(self):
        self.connection.note(0)

    def refuse(self):
        self.connection.refuse()

    def hear_nonsense(self):
        self.hear(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))


WAYS = {
    "connecting": (),
    "handshake": (Side.connect,),
    "open": (Side.connect, Side.shake_hands),
    "suspended": (Side.connect, Side.shake_hands, Side.be_kept),
    "closing": (Side.connect, Side.shake_hands, Side.break_),
    "closed": (Side.refuse,),
}
OCCURRENCES = (
    *(Side.connect, Side.shake_hands, Side.hang_up, Side.be_kept, Side.resume),
    *(Side.break_, Side.read_what_came, Side.refuse, Side.hear_nonsense),
)


@pytest.mark.parametrize("state", STATES)
def test_what_follows_a_state(state):
    found = set()
    for happens in OCCURRENCES:
        with Side() as side:
            for step in WAYS[state]:
                step(side)
            assert side.connection.state == state
            happens(side)
            found.add(side.connection.state)
    assert found - {state} == following()[state]


def test_a_connection_in_its_handshake_is_not_kept():
    with Side() as side:
        side.connect()
        side.be_kept()
        assert side.connection.state == "closed"


def test_who_can_send_nothing_more_is_heard_to_the_end():
    with Side() as side:
        side.connect()
        side.break_()
        side.shake_hands()
        assert side.connection.state == "closing"
        side.read_what_came()
        assert side.connection.state == "closed"
