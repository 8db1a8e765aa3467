"""The fixed header that starts every message (`docs/protocol.md`, section 2)."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from reducer.errors import RemoteProtocolError, VersionError
from reducer.wire.constants import (
    HEADER_BYTES,
    MAGIC,
    MAX_TOTAL_BYTES,
    NO_SEQUENCE,
    VERSION_MAJOR,
    VERSION_MINOR,
    DType,
    MessageType,
    ReduceOp,
)

Buffer: TypeAlias = "bytes | bytearray | memoryview"

LAYOUT = struct.Struct("<4sBBHQIIQQQQIIBBBxIQQQ")
PREFIX = struct.Struct("<4sBB")  # the part that no version moves
VERSION = f"{VERSION_MAJOR}.{VERSION_MINOR}"


class Header(NamedTuple):
    """One header's fields; `docs/protocol.md` gives the meaning of each.

    `dtype`, `op` and `wire_dtype` are 0 in messages that carry no elements.
    """

    type: MessageType
    flags: int = 0
    job: int = 0
    generation: int = 0
    epoch: int = 0
    sequence: int = NO_SEQUENCE
    watermark: int = 0
    total_bytes: int = 0
    offset: int = 0
    nbytes: int = 0
    rank: int = 0
    dtype: int = 0
    op: int = 0
    wire_dtype: int = 0
    since: int = 0
    tag: int = 0
    window: int = 0
    history: int = 0

    def pack(self) -> bytes:
        """Return the 96 bytes of this header."""
        return LAYOUT.pack(MAGIC, VERSION_MAJOR, *self)

    @classmethod
    def unpack(cls, data: Buffer) -> Header:
        """Read a header and check what can be checked without knowing the sender.

        Raises:
            RemoteProtocolError: it is no header of this protocol.
            VersionError: it is one of another major version.
        """
        if len(data) < PREFIX.size:
            raise RemoteProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, major, _ = PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise RemoteProtocolError(f"a header starts with {MAGIC!r}, got {magic!r}")
        if major != VERSION_MAJOR:
            raise version_error(f"{major}.x")
        if len(data) != HEADER_BYTES:
            raise RemoteProtocolError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        _, _, kind, *rest = LAYOUT.unpack(data)
        if kind not in _TYPES:
            raise RemoteProtocolError(f"unknown message type {kind}")
        header = cls(_TYPES[kind], *rest)
        if header.flags:
            raise RemoteProtocolError(f"flags {header.flags:#x} belong to no agreed feature")
        return header


def version_error(got: str) -> VersionError:
    """Return the error of a peer that speaks `got`, of another major version."""
    return VersionError(
        f"this side speaks protocol {VERSION}, the peer {got}: "
        "install the same major version of reduction-server on both",
        expected=VERSION,
        got=got,
    )


_TYPES = {int(kind): kind for kind in MessageType}
_DTYPES = {int(dtype): dtype for dtype in DType}
_OPS = {int(op): op for op in ReduceOp}


def check_chunk(header: Header, payload_bytes: int, max_chunk_bytes: int) -> None:
    """Check every element-related field of a CONTRIBUTION or RESULT before it is used.

    Raises:
        RemoteProtocolError: a field is out of bounds or contradicts another one.
    """
    dtype, op = _DTYPES.get(header.dtype), _OPS.get(header.op)
    if dtype is None:
        raise RemoteProtocolError(f"unknown dtype code {header.dtype}")
    if op is None:
        raise RemoteProtocolError(f"unknown op code {header.op}")
    if not dtype.defines(op):
        raise RemoteProtocolError(f"{op.name} is not defined for {dtype.name}")
    if header.wire_dtype != header.dtype:
        raise RemoteProtocolError("wire compression was not agreed")
    if header.sequence == NO_SEQUENCE:
        raise RemoteProtocolError("a chunk needs a sequence number")
    if payload_bytes != header.nbytes:
        raise RemoteProtocolError(f"announced {header.nbytes} bytes, got {payload_bytes}")
    if header.nbytes > max_chunk_bytes:
        raise RemoteProtocolError(f"a chunk has at most {max_chunk_bytes} bytes")
    if header.nbytes == 0 and header.total_bytes > 0:
        raise RemoteProtocolError("an empty chunk of a buffer that is not empty")
    if header.total_bytes > MAX_TOTAL_BYTES:
        raise RemoteProtocolError(f"a buffer has at most {MAX_TOTAL_BYTES} bytes")
    if header.offset + header.nbytes > header.total_bytes:
        raise RemoteProtocolError("the chunk ends after its buffer")
    if (header.offset | header.nbytes | header.total_bytes) % dtype.itemsize:
        raise RemoteProtocolError(f"sizes must be multiples of {dtype.itemsize} for {dtype.name}")


def fingerprint(name: str) -> int:
    """Return the 64-bit number that stands for a job's or an all-reduce's name in headers."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
