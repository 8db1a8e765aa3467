"""Whether a server demands keys: it says so in the first bytes of a connection (ZMTP 3).

libzmq's client often finds the connection closed before it has read as much.
"""

from __future__ import annotations

import socket

TIMEOUT_S = 0.3
_BEGIN = b"\xff" + bytes(7) + b"\x01\x7f\x03"  # signature, and the major version that we speak
_MECHANISM = slice(12, 32)
_BYTES = 64


def mechanism(address: str) -> str:
    """Return what protects connections there, ``CURVE`` or ``NULL``; nothing if it is no ZeroMQ.

    Args:
        address: ``host:port``.
    """
    host, _, port = address.rpartition(":")
    greeting = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(_BEGIN)
            while len(greeting) < _BYTES and (more := connection.recv(_BYTES - len(greeting))):
                greeting += more
    except OSError:
        return ""
    if len(greeting) < _BYTES or greeting[0] != 0xFF:
        return ""
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
