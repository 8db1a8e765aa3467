"""How a worker that breaks the rules talks to a reducer: bare, or encrypted with its job's keys."""

import struct
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from hostile.zmtp import COMMAND, GREETING, HANDSHAKE, LONG, MORE, dial, frame
from worker_client.runtime.credentials import load

PATIENCE_S = 10.0
# libzmq notices no end of a connection that it has stopped to read.
ENCRYPTED_PATIENCE_S = 1.0


class Line(Protocol):
    """A connection that takes whatever it is told to say."""

    def say(self, header: bytes, payload: bytes) -> None:
        """Send a message; OSError: nobody takes it any more."""

    def hear(self) -> tuple[bytes, bytes]:
        """Return the next message; OSError: none comes."""

    def close(self) -> None:
        """Go without a word."""


class Bare:
    """ZMTP by hand to a reducer's address: nothing is read but by whoever asked."""

    def __init__(self, address: str) -> None:
        self.connection = dial(address)
        self.connection.settimeout(PATIENCE_S)
        self.connection.sendall(HANDSHAKE)
        self._take(len(GREETING))

    def say(self, header: bytes, payload: bytes) -> None:
        """Send a message."""
        self.connection.sendall(frame(header, MORE) + frame(payload))

    def hear(self) -> tuple[bytes, bytes]:
        """Return the next message."""
        frames: list[bytes] = []
        more = MORE
        while more:
            flags = self._take(1)[0]
            length = struct.unpack(">Q", self._take(8))[0] if flags & LONG else self._take(1)[0]
            body = self._take(length)
            if not flags & COMMAND:
                frames.append(body)
                more = flags & MORE
        return frames[0], frames[1] if len(frames) > 1 else b""

    def close(self) -> None:
        """Go without a word."""
        self.connection.close()

    def _take(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            part = self.connection.recv(nbytes - len(found))
            if not part:
                raise ConnectionResetError
            found += part
        return found


class Encrypted:
    """CURVE by libzmq, which reads a message ahead, with a job's keys of `reducer keygen`."""

    def __init__(self, address: str, keys: Path) -> None:
        curve = load(keys).pool
        assert curve is not None
        secret = curve.secret.encode("ascii")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDHWM, 2)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server.encode("ascii"))
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{address}")

    def say(self, header: bytes, payload: bytes) -> None:
        """Send a message."""
        self._wait(zmq.POLLOUT)
        try:
            self._socket.send_multipart([header, payload], zmq.DONTWAIT)
        except zmq.Again:  # the other side hung up since
            raise ConnectionResetError from None

    def hear(self) -> tuple[bytes, bytes]:
        """Return the next message."""
        self._wait(zmq.POLLIN)
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        return frames[0], frames[1] if len(frames) > 1 else b""

    def close(self) -> None:
        """Go without a word."""
        self._socket.disable_monitor()
        self._ends.close()
        self._socket.close()
        self._context.term()

    def _wait(self, event: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._ends, zmq.POLLIN)
        ready = dict(poller.poll(int(ENCRYPTED_PATIENCE_S * 1e3)))
        if self._socket in ready:
            return
        if self._ends in ready:
            recv_monitor_message(self._ends)
            raise ConnectionResetError
        raise TimeoutError
