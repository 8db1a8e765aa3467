"""A reducer that speaks ZMTP by hand: it says what it is told to, and can stop anywhere."""

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from hostile.zmtp import COMMAND, GREETING, LONG, MORE, frame
from reducer.errors import ReductionTimeout
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode, encode_error
from tests.waits import eventually
from worker_client.runtime.events import Connected

M = MessageType
CHUNK = 64 << 10
MIB = 1 << 20
# Not 127.0.0.1: there workers of other tests look for reducers that are gone, whose ports are free.
HOST = "127.0.0.2"
READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0", COMMAND)


class Heard(NamedTuple):
    """A message that reached a reducer; `payload` is None in one of a single frame."""

    header: Header
    payload: np.ndarray | None


class Reducer:
    """The reducer of one worker, which reads nothing but what a test asks for.

    It has `said` and `heard` so many bytes over the connection to its latest `peer`.
    """

    before = b""  # bytes that were read already, to be parsed first

    def __init__(self, receive_bytes=0, features=0, port=0):
        self._open = ExitStack()
        self.listener = self._open.enter_context(socket.create_server((HOST, port)))
        if receive_bytes:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.address = f"{HOST}:{self.listener.getsockname()[1]}"
        self._features = features

    def close(self):
        self._open.close()

    def accept(self):
        """Take the next connection, and say our part of the handshake."""
        self.listener.settimeout(5)
        self.peer = self._open.enter_context(self.listener.accept()[0])
        self.peer.settimeout(5)
        self.said = self.heard = 0
        self.send(GREETING + READY)
        self.read(len(GREETING))

    def welcome(self):
        """Take the next connection, and have its worker join."""
        self.accept()
        hello = self.hear(M.HELLO)
        answer = Header(M.WELCOME, window=hello.header.window)
        self.say(answer, encode(Welcome("1", ticket="a" * 32, features=self._features)))

    def read(self, nbytes):
        data, self.before = self.before[:nbytes], self.before[nbytes:]
        while len(data) < nbytes:
            part = self.peer.recv(nbytes - len(data))
            assert part, "the worker has hung up"
            self.heard += len(part)
            data += part
        return data

    def _frame(self):
        flags, size = self.read(2)
        if flags & LONG:
            (size,) = struct.unpack(">Q", bytes([size]) + self.read(7))
        return flags, self.read(size)

    def hear(self, kind=None):
        """Return the next message, which is to be of a kind; heartbeats are not answered."""
        flags, body = self._frame()
        while flags & COMMAND:
            flags, body = self._frame()
        payload = np.frombuffer(self._frame()[1], np.uint8) if flags & MORE else None
        heard = Heard(Header.unpack(body), payload)
        assert kind in {None, heard.header.type}
        return heard

    def hear_chunks(self, number):
        return [self.hear(M.CONTRIBUTION) for _ in range(number)]

    def hears_nothing(self, for_s=0.1):
        self.peer.settimeout(for_s)
        try:
            self.hear()
        except TimeoutError:
            return True
        finally:
            self.peer.settimeout(5)
        return False

    def send(self, data):
        self.said += len(data)
        self.peer.sendall(data)

    def say(self, header, payload=None):
        self.send(message(header, payload))

    def answer(self, heard, **change):
        self.send(result(heard, **change))

    def serve(self, chunks):
        """Answer so many contributions in order."""
        for _ in range(chunks):
            self.answer(self.hear(M.CONTRIBUTION))

    def fail(self, sequence):
        body = encode_error(ReductionTimeout("too late", missing=(1,)))
        self.say(Header(M.ERROR, sequence=sequence), body)


def meet(transport, *reducers):
    """Have reducers accept a worker's transport that has no client, and nothing else happen."""
    reached = []

    def has_reached_all():
        transport.wait(0.1)
        reached.extend(transport.events())
        return len(reached) == len(reducers)

    with ThreadPoolExecutor(len(reducers)) as threads:
        accepted = threads.map(Reducer.accept, reducers)
        eventually(has_reached_all)
        list(accepted)
    assert set(reached) == {Connected(link) for link in range(len(reducers))}


def message(header, payload=None):
    if payload is None:
        return frame(header.pack())
    return frame(header.pack(), MORE) + frame(bytes(payload))


def result(heard, payload=None, **change):
    """What comes out of a contribution: every byte plus one."""
    header = heard.header._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
    return message(header._replace(**change), comes(heard.payload) if payload is None else payload)


def comes(data):
    """What comes out where such bytes went in."""
    return data + np.uint8(1)


def ramp(nbytes):
    """Bytes that say where they come from."""
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8)
