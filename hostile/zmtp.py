"""What strangers say to a reducer's port: other protocols, and bad ZMTP 3 by hand."""

import os
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from reducer.wire.constants import PLACES, DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes([flags, len(body)]) + body


_GUESS = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x05\0%b"
_GUESSES = 64  # connections of a small reducer, if it counts them
HANDSHAKE = GREETING + frame(_READY, COMMAND)


def dial(address: str) -> socket.socket:
    """Connect to ``host:port``; nothing is read but by whoever asked."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def say(address: str, *words: bytes, pause_s: float = 0.0) -> socket.socket:
    """Connect and send these, as far as the other side takes them."""
    connection = dial(address)
    connection.settimeout(0.5)
    with suppress(OSError):  # it has every right to hang up
        for word in words:
            connection.sendall(word)
            time.sleep(pause_s)
    return connection


def _tls() -> bytes:
    hello = b"\x03\x03" + os.urandom(32) + b"\0\0\x02\x13\x01\x01\0"
    shake = b"\x01" + len(hello).to_bytes(3, "big") + hello
    return b"\x16\x03\x01" + len(shake).to_bytes(2, "big") + shake


def _guess() -> list[bytes]:
    number = random.randrange(_GUESSES)  # noqa: S311 (no secret)
    ready = frame(_GUESS % number.to_bytes(4, "big"), COMMAND)
    goodbye = Header(MessageType.GOODBYE, job=fingerprint("honest"), rank=number % 2)
    return [GREETING, ready, frame(goodbye.pack(), MORE) + frame(b"")]


def _long(*lengths: int) -> bytes:
    return b"".join(struct.pack(">BQ", LONG, length) for length in lengths)


_PING = frame(b"\x04PING\0\0" + bytes(16), COMMAND)
# What each says; then it stays.
_WORDS: dict[str, Callable[[], list[bytes]]] = {
    "idle": list,
    "http": lambda: [b"GET / HTTP/1.1\r\nHost: reducer\r\nAccept: */*\r\n\r\n"],
    "tls": lambda: [_tls()],
    # ZMTP 1: no greeting, an empty identity, and then a message of three frames.
    "zmtp1": lambda: [
        *(b"\x01\0", b"\x61\x01" + Header(MessageType.CONTRIBUTION).pack()),
        *(b"\x05\x01abcd", b"\x05\0abcd"),
    ],
    # Frames of more bytes than there are.
    "huge": lambda: [HANDSHAKE, _long(1 << 63, (1 << 64) - 1), bytes(1 << 16)],
    "noise": lambda: [HANDSHAKE if os.urandom(1)[0] & 1 else b"", os.urandom(4096)],
    # A greeting that never ends.
    "loris": lambda: [GREETING[at : at + 1] for at in range(4)],
    # 4 MiB, but for the end of them.
    "partial": lambda: [HANDSHAKE, _long(4 << 20), bytes((4 << 20) - 1)],
    # One message of ever more frames.
    "endless": lambda: [HANDSHAKE, *[frame(bytes(1 << 16), MORE) * 16] * 64],
    # The routing id of another connection, and a goodbye for a rank of job "honest".
    "guess": _guess,
    # 4 MiB of PINGs; no answer is read.
    "pings": lambda: [HANDSHAKE, _PING * ((4 << 20) // len(_PING))],
}


def mutated(address: str) -> None:
    """Say what a worker says, with some of it changed or cut off, and hang up."""
    name = "mutated"
    common = Header(MessageType.HELLO, job=fingerprint(name), window=1 << 20)
    hello = Hello(name, world_size=1, reducers=1, reducer_index=0, chunk_bytes=0, patience_ms=5000)
    said = bytearray(HANDSHAKE + frame(common.pack(), MORE) + frame(encode(hello)))
    for chunk in range(4):
        contribution = common._replace(
            type=MessageType.CONTRIBUTION,
            sequence=chunk * PLACES + 1,
            total_bytes=256,
            nbytes=256,
            dtype=DType.FLOAT32,
            op=ReduceOp.SUM,
            wire_dtype=DType.FLOAT32,
        )
        said += frame(contribution.pack(), MORE) + frame(bytes(256))
    for _ in range(random.choice((1, 2, 5, 20))):  # noqa: S311 (no secret)
        said[random.randrange(len(GREETING), len(said))] = random.randrange(256)  # noqa: S311
    if random.random() < 0.3:  # noqa: S311
        del said[random.randrange(len(said)) :]  # noqa: S311
    with suppress(OSError), dial(address) as connection:
        connection.sendall(said)
        connection.settimeout(0.01)
        connection.recv(4096)


def _stranger(kind: str, address: str) -> socket.socket:
    return say(address, *_WORDS[kind](), pause_s=0.01 if kind == "loris" else 0.0)


STRANGERS: dict[str, Callable[[str], socket.socket]] = {
    kind: partial(_stranger, kind) for kind in _WORDS
}
