"""A reducer that speaks ZMTP by hand, so that it can stop anywhere."""

import socket
import struct

import numpy as np

from hostile.zmtp import COMMAND, GREETING, LONG, MORE, frame
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode
from tests.transport.scripted import HOST, M

READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0", COMMAND)


class Reducer:
    """A reducer that can stop in the middle of a message."""

    def __init__(self):
        self.listener = socket.create_server((HOST, 0))
        self.peer = None

    def close(self):
        if self.peer is not None:
            self.peer.close()
        self.listener.close()

    def read(self, nbytes):
        data = b""
        while len(data) < nbytes:
            part = self.peer.recv(nbytes - len(data))
            assert part, "the worker has hung up"
            data += part
        return data

    def _frame(self):
        flags, size = self.read(2)
        if flags & LONG:
            (size,) = struct.unpack(">Q", bytes([size]) + self.read(7))
        return flags, self.read(size)

    def hear(self, kind):
        """Return the next message of a kind; others, and ZMTP's heartbeats, are not answered."""
        while True:
            flags, body = self._frame()
            if flags & COMMAND:
                continue
            payload = self._frame()[1] if flags & MORE else b""
            header = Header.unpack(body)
            if header.type is kind:
                return header, np.frombuffer(payload, np.uint8)

    def accept(self):
        """Say our part of the handshake."""
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(5)
        self.peer.sendall(GREETING + READY)

    def hear_greeting(self):
        self.read(len(GREETING))

    def welcome(self):
        self.accept()
        self.hear_greeting()
        hello, _ = self.hear(M.HELLO)
        self.peer.sendall(message(Header(M.WELCOME, window=hello.window), encode(Welcome("1"))))


def message(header, payload):
    return frame(header.pack(), MORE) + frame(payload)


def result(contribution, payload):
    header = contribution._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
    return message(header, payload)
