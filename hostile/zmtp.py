"""What strangers say to a reducer's port: other protocols, and bad ZMTP 3 by hand."""

import os
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from reducer.wire.constants import PLACES, DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
_READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame of ZMTP 3."""
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


def idle(address: str) -> socket.socket:
    """Connect, and say nothing."""
    return dial(address)


def http(address: str) -> socket.socket:
    """Ask for a page."""
    return say(address, b"GET / HTTP/1.1\r\nHost: reducer\r\nAccept: */*\r\n\r\n")


def tls(address: str) -> socket.socket:
    """Say a TLS client's hello."""
    hello = b"\x03\x03" + os.urandom(32) + b"\0\0\x02\x13\x01\x01\0"
    shake = b"\x01" + len(hello).to_bytes(3, "big") + hello
    return say(address, b"\x16\x03\x01" + len(shake).to_bytes(2, "big") + shake)


def zmtp1(address: str) -> socket.socket:
    """Speak ZMTP 1: no greeting, an empty identity, and then a message of three frames."""
    header = Header(MessageType.CONTRIBUTION).pack()
    return say(address, b"\x01\0", b"\x61\x01" + header, b"\x05\x01abcd", b"\x05\0abcd")


def huge(address: str) -> socket.socket:
    """Announce frames of more bytes than there are."""
    lengths = b"".join(struct.pack(">BQ", LONG, length) for length in (1 << 63, (1 << 64) - 1))
    return say(address, HANDSHAKE, lengths, bytes(1 << 16))


def noise(address: str) -> socket.socket:
    """Say random bytes, with a handshake before them every other time."""
    handshake = HANDSHAKE if os.urandom(1)[0] & 1 else b""
    return say(address, handshake + os.urandom(4096))


def loris(address: str) -> socket.socket:
    """Begin a greeting, and never end it."""
    return say(address, *(GREETING[i : i + 1] for i in range(4)), pause_s=0.01)


def partial(address: str) -> socket.socket:
    """Shake hands, announce 4 MiB, and send all but the end of them."""
    return say(address, HANDSHAKE, struct.pack(">BQ", LONG, 4 << 20), bytes((4 << 20) - 1))


def endless(address: str) -> socket.socket:
    """Shake hands, and send one message of ever more frames."""
    frames = frame(bytes(1 << 16), MORE) * 16
    return say(address, HANDSHAKE, *[frames] * 64)


def guess(address: str) -> socket.socket:
    """Claim the routing id of another connection, and say goodbye for a rank of job "honest"."""
    number = random.randrange(_GUESSES)  # noqa: S311 (no secret)
    ready = frame(_GUESS % number.to_bytes(4, "big"), COMMAND)
    goodbye = Header(MessageType.GOODBYE, job=fingerprint("honest"), rank=number % 2)
    return say(address, GREETING, ready, frame(goodbye.pack(), MORE) + frame(b""))


def pings(address: str) -> socket.socket:
    """Shake hands, and send 4 MiB of PINGs; no answer is read."""
    ping = frame(b"\x04PING\0\0" + bytes(16), COMMAND)
    return say(address, HANDSHAKE, ping * ((4 << 20) // len(ping)))


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


STRANGERS: dict[str, Callable[[str], socket.socket]] = {
    said.__name__: said
    for said in (idle, http, tls, zmtp1, huge, noise, loris, partial, endless, guess, pings)
}
