"""The first bytes of a connection: whether ZeroMQ answers there, and what protects it (ZMTP 3).

A server says them before it demands anything.
"""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

TIMEOUT_S = 2.0  # to connect, and for the answer
# Signature and major version. Told more, a server whose mechanism is another one says nothing.
_BEGIN = b"\xff" + bytes(7) + b"\x01\x7f\x03"
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_LINES = b"\r\n\r\n"


class Greeting(NamedTuple):
    """What a server says first.

    Attributes:
        mechanism: of ZeroMQ, ``NULL`` or ``CURVE``; empty if it is no ZeroMQ.
        timed_out: it has said nothing in time.
    """

    mechanism: str = ""
    timed_out: bool = False


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def greet(host: str, port: int, timeout_s: float = TIMEOUT_S) -> Greeting:
    """Connect, and read the greeting.

    Args:
        host: name or number of the other side.
        port: where it listens.
        timeout_s: seconds to connect, and for the answer.

    Raises:
        OSError: there is no connection.
    """
    with socket.create_connection((host, port), timeout_s) as connection:
        try:
            connection.sendall(_BEGIN, socket.MSG_NOSIGNAL)
            heard = _read_some(connection)
            if not heard:
                # A server of lines of text answers these.
                connection.sendall(_LINES, socket.MSG_NOSIGNAL)
                return Greeting(timed_out=not connection.recv(1))
        except TimeoutError:
            return Greeting(timed_out=True)
        except ConnectionError:
            return Greeting()  # it went away, as what speaks another protocol may
    if len(heard) < _GREETING_BYTES or heard[0] != 0xFF or heard[9] != 0x7F:
        return Greeting()
    return Greeting(heard[_MECHANISM].rstrip(b"\0").decode("ascii", "replace"))


def _read_some(connection: socket.socket) -> bytes:
    """Return what comes until a greeting is complete, the other side ends, or time is over."""
    heard = b""
    with contextlib.suppress(TimeoutError):
        while len(heard) < _GREETING_BYTES:
            more = connection.recv(_GREETING_BYTES - len(heard))
            if not more:
                break
            heard += more
    return heard
