"""A reducer that says what it is told to."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Reducer:
    """A ROUTER socket that knows one worker and says what it is told to."""

    def __init__(self, context: zmq.Context, receive_limit: int = 0) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        if receive_limit:
            self.socket.rcvhwm = 1
            self.socket.rcvbuf = receive_limit
        self.port = self.socket.bind_to_random_port(f"tcp://{HOST}")
        self.worker = b""

    def hear(self, kind: MessageType | None = None, within_s: float = 5.0) -> Heard:
        assert self.socket.poll(int(within_s * 1000)), f"no {kind and kind.name} came"
        self.worker, *frames = self.socket.recv_multipart()
        header = Header.unpack(frames[0])
        assert kind in {None, header.type}
        return Heard(header, np.frombuffer(frames[1], np.uint8) if len(frames) > 1 else None)

    def hears_nothing(self, for_s: float = 0.1) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def say(self, *frames: bytes | np.ndarray) -> None:
        self.socket.send_multipart([self.worker, *frames])

    def welcome(self) -> None:
        hello = self.hear(M.HELLO)
        answer = Header(M.WELCOME, window=hello.header.window)
        self.say(answer.pack(), encode(Welcome(incarnation="1")))

    def answer(self, heard: Heard, **change: Any) -> None:
        """Say what comes out: every byte of the contribution plus one."""
        header = heard.header._replace(type=M.RESULT, rank=0, watermark=0, since=0, history=0)
        payload = change.pop("payload", heard.payload + np.uint8(1))
        self.say(header._replace(**change).pack(), payload)

    def fail(self, sequence: int) -> None:
        body = encode_error(ReductionTimeout("too late", missing=(1,)))
        self.say(Header(M.ERROR, sequence=sequence).pack(), body)


def ramp(nbytes: int) -> np.ndarray:
    """Bytes that say where they come from."""
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8)
