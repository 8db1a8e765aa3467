"""One connection of the kit: ZMTP 3.1 by hand (RFC 37), so that a case sees and says every byte."""

from __future__ import annotations

import json
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.wire.header import Header

if TYPE_CHECKING:
    import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
PING_S = 0.2  # between two heartbeats


class FailedCaseError(Exception):
    """What the other side did that the specification does not allow."""


class Received(NamedTuple):
    """One message; `header` is None if frame 0 is no header."""

    header: Header | None
    payload: bytes
    frames: tuple[bytes, ...]
    at: float

    def body(self) -> dict[str, Any]:
        """Return the JSON object of frame 1."""
        try:
            values = json.loads(self.payload)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise FailedCaseError(f"a body is one JSON object, got {self.payload!r:.60}")
        return values

    def __str__(self) -> str:
        """Say what it is, for people."""
        if self.header is None:
            return f"{len(self.frames)} frames that begin with {self.frames[0]!r:.40}"
        kind, size = self.header.type.name, len(self.payload)
        said = self.payload.decode(errors="replace")[:200] if kind == "ERROR" else f"{size} bytes"
        return f"{kind} {self.header.sequence} ({said})"


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return the bytes of a frame."""
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes([flags, len(body)]) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    """Return the bytes of a command of ZMTP."""
    return frame(bytes([len(name)]) + name + body, COMMAND)


class Peer:
    """A connection that has begun.

    Args:
        connection: to the other side.
        kind: our type of socket, ``DEALER`` or ``ROUTER``.

    Attributes:
        greeting: the other side's, when it is complete.
        commands: what it has said besides messages: when, the name, and what follows it.
        closed: it has ended the connection.
        deaf: its PINGs are not answered, and none are sent.
    """

    def __init__(self, connection: socket.socket, kind: bytes) -> None:
        self.connection = connection
        self.greeting = b""
        self.commands: list[tuple[float, bytes, bytes]] = []
        self.closed = self.deaf = False
        self._inbox: list[Received] = []
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._ping_at = 0.0
        properties = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self.say(GREETING, command(b"READY", properties + b"\x08Identity" + bytes(4)))

    def say(self, *parts: bytes) -> None:
        """Send bytes; if the other side has closed, reading shows it."""
        try:
            self.connection.sendall(b"".join(parts))
        except OSError:
            self.closed = True

    def send(self, header: Header | bytes, *payload: bytes) -> None:
        """Send a message, of a header and further frames."""
        head = header.pack() if isinstance(header, Header) else header
        frames = [head, *payload]
        last = len(frames) - 1
        self.say(*(frame(one, MORE if at < last else 0) for at, one in enumerate(frames)))

    @property
    def ready(self) -> bool:
        """Whether the other side has ended its handshake: libzmq takes nothing before that."""
        return any(name == b"READY" for _, name, _ in self.commands)

    def pending(self) -> list[Received]:
        """Return the messages that `feed` has read."""
        messages, self._inbox = self._inbox, []
        return messages

    def heartbeat(self) -> None:
        """Send a PING if one is due."""
        if self.ready and not self.deaf and time.monotonic() >= self._ping_at:
            self._ping_at = time.monotonic() + PING_S
            self.say(command(b"PING", b"\0\0kit"))

    def feed(self) -> None:
        """Read what has come; one call blocks only if nothing has."""
        try:
            data = self.connection.recv(1 << 18)
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self._buffer += data
        if not self.greeting and len(self._buffer) >= 64:
            self.greeting = bytes(self._buffer[:64])
            del self._buffer[:64]
        while self.greeting and self._take_frame():
            pass

    def _take_frame(self) -> bool:
        wide = 9 if self._buffer and self._buffer[0] & LONG else 2
        if len(self._buffer) < wide:
            return False
        flags, size = struct.unpack_from(">BQ" if wide == 9 else ">BB", self._buffer)
        if size > 1 << 26:
            raise FailedCaseError(f"a frame of {size} bytes, or what is no frame")
        if len(self._buffer) < wide + size:
            return False
        body = bytes(self._buffer[wide : wide + size])
        del self._buffer[: wide + size]
        if flags & COMMAND:
            name, rest = body[1 : 1 + body[0]], body[1 + body[0] :]
            self.commands.append((time.monotonic(), name, rest))
            if name == b"PING" and not self.deaf:
                self.say(command(b"PONG", rest[2:]))
            return True
        self._frames.append(body)
        if not flags & MORE:
            frames, self._frames = tuple(self._frames), []
            self._inbox.append(_message(frames))
        return True


def _message(frames: tuple[bytes, ...]) -> Received:
    header: Header | None
    try:
        header = Header.unpack(frames[0])
    except Exception:  # noqa: BLE001 (the case that reads it says what is wrong)
        header = None
    return Received(header, b"".join(frames[1:]), frames, time.monotonic())
