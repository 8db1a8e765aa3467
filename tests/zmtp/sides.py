"""Sides of connections: pairs of ours, joined without a network, and one of ours on a socket."""

import contextlib
import time
from typing import NamedTuple

import zmq
from zmq.utils import z85

from tests.zmtp._zmtp import Zmtp

MAX_FRAME_BYTES = 8 << 20
TIMEOUT_S = 20.0
MECHANISMS = ("NULL", "CURVE")


class Pair(NamedTuple):
    """A key pair, in Z85 as pyzmq takes it."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls):
        return cls(*zmq.curve_keypair())


class Keys(NamedTuple):
    """Those of one server and one client."""

    server: Pair
    client: Pair

    @classmethod
    def new(cls):
        return cls(Pair.new(), Pair.new())


def ours(keys, *, server, max_frame_bytes=MAX_FRAME_BYTES):
    """Our side of a connection."""
    if keys is None:
        return Zmtp(server, None, max_frame_bytes)
    pair = keys.server if server else keys.client
    three = (*(z85.decode(key) for key in pair), z85.decode(keys.server.public))
    return Zmtp(server, three, max_frame_bytes)


def keys_for(mechanism):
    return Keys.new() if mechanism == "CURVE" else None


def take(side, data, *, admits=True):
    """Let a side take bytes, and admit whom it asks about."""
    events = side.take(data)
    while events and events[-1][0] == "admit":
        events += side.admit(admits)
    return events


def whole(data):
    """A flight that arrives as it was sent."""
    return [data]


def shake_hands(client, server, *, to_server=whole, to_client=whole, admits=True):
    """Let two of ours talk until they have nothing to say; what both notice, the client first."""
    noticed = ([], [])
    while True:
        said = client.reply(), server.reply()
        if said == (b"", b""):
            return noticed
        for piece in to_server(said[0]):
            noticed[1].extend(take(server, piece, admits=admits))
        for piece in to_client(said[1]):
            noticed[0].extend(take(client, piece))


def joined(keys, max_frame_bytes=MAX_FRAME_BYTES):
    """Client and server after their handshake."""
    client, server = (
        ours(keys, server=server, max_frame_bytes=max_frame_bytes) for server in (False, True)
    )
    shake_hands(client, server)
    assert client.ready
    assert server.ready
    return client, server


class Wire:
    """Our side on a socket, which admits a client or not, if it is asked."""

    def __init__(self, connection, side, *, admits=True):
        self.connection = connection
        self.side = side
        self.received = 0  # bytes
        self._admits = admits
        self.asked = []  # whom to admit
        self._events = []
        connection.settimeout(TIMEOUT_S)
        self._flush()

    def next(self, timeout_s=TIMEOUT_S):
        """What happens next: an event, or that the other side has closed, or nothing in time."""
        deadline = time.monotonic() + timeout_s
        while not self._events:
            left = deadline - time.monotonic()
            if left <= 0:
                return ("nothing",)
            self.connection.settimeout(left)
            try:
                data = self.connection.recv(1 << 16)
            except TimeoutError:
                return ("nothing",)
            except ConnectionError:
                data = b""
            if not data:
                return ("closed",)
            self.received += len(data)
            for event in take(self.side, data, admits=self._admits):
                (self.asked if event[0] == "admit" else self._events).append(event)
            self._flush()
        return self._events.pop(0)

    def send(self, data):
        self.connection.settimeout(TIMEOUT_S)
        self.connection.sendall(data)

    def _flush(self):
        with contextlib.suppress(ConnectionError):  # what has come is still to be read
            self.send(self.side.reply())
