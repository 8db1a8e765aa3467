"""A reducer that says what it is told to."""

from typing import NamedTuple

import numpy as np
import zmq

from reducer.errors import ReductionTimeout
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode, encode_error

M = MessageType
CHUNK = 64 << 10
MIB = 1 << 20
# Not 127.0.0.1: there workers of other tests look for reducers that are gone, whose ports are free.
HOST = "127.0.0.2"


class Heard(NamedTuple):
    """A message that reached a reducer; `payload` is None in one of a single frame."""

    header: Header
    payload: np.ndarray | None


def sockets_made(patch):
    """Return a list that grows with libzmq's sockets."""
    made, make = [], zmq.Context.socket

    def note(context, *given, **how):
        made.append(make(context, *given, **how))
        return made[-1]

    patch.setattr(zmq.Context, "socket", note)
    return made


class Reducer:
    """A ROUTER socket that knows one worker and says what it is told to."""

    def __init__(self, context, receive_limit=0):
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        if receive_limit:
            self.socket.rcvhwm = 1
            self.socket.rcvbuf = receive_limit
        self.port = self.socket.bind_to_random_port(f"tcp://{HOST}")
        self.worker = b""

    def hear(self, kind=None, within_s=5.0):
        assert self.socket.poll(int(within_s * 1000)), f"no {kind and kind.name} came"
        self.worker, *frames = self.socket.recv_multipart()
        header = Header.unpack(frames[0])
        assert kind in {None, header.type}
        return Heard(header, np.frombuffer(frames[1], np.uint8) if len(frames) > 1 else None)

    def hears_nothing(self, for_s=0.1):
        return not self.socket.poll(int(for_s * 1000))

    def say(self, *frames):
        self.socket.send_multipart([self.worker, *frames])

    def welcome(self):
        hello = self.hear(M.HELLO)
        answer = Header(M.WELCOME, window=hello.header.window)
        self.say(answer.pack(), encode(Welcome(incarnation="1")))

    def answer(self, heard, **change):
        """Say what comes out: every byte of the contribution plus one."""
        header = heard.header._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
        payload = change.pop("payload", heard.payload + np.uint8(1))
        self.say(header._replace(**change).pack(), payload)

    def fail(self, sequence):
        body = encode_error(ReductionTimeout("too late", missing=(1,)))
        self.say(Header(M.ERROR, sequence=sequence).pack(), body)


def ramp(nbytes):
    """Bytes that say where they come from."""
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8)
