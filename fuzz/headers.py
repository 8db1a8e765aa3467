"""Target ``header``: frame 0, and the checks of the fields about elements."""

from __future__ import annotations

from typing import Any

from fuzz.source import Source, check
from reducer.errors import ReductionError, RemoteProtocolError
from reducer.wire.constants import (
    HEADER_BYTES,
    MAGIC,
    MAX_CHUNK_BYTES,
    NO_SEQUENCE,
    VERSION_MAJOR,
    DType,
    MessageType,
    ReduceOp,
)
from reducer.wire.header import Header, check_chunk

WIDTHS = {
    "type": 8,
    "flags": 16,
    "job": 64,
    "generation": 32,
    "epoch": 32,
    "sequence": 64,
    "watermark": 64,
    "total_bytes": 64,
    "offset": 64,
    "nbytes": 32,
    "rank": 32,
    "dtype": 8,
    "op": 8,
    "wire_dtype": 8,
    "since": 32,
    "tag": 64,
    "window": 64,
    "history": 64,
}  # bits of each field
_ITEMSIZES = (0, 4, 8, 2, 2, 1, 4, 8, 1, 256, 256)  # by code; written again, to be independent
_SET_ASIDE = 67  # the byte that pads the dtypes


def mutate(header: Header, source: Source) -> Header:
    """Return a header with one field changed."""
    name = source.pick(Header._fields)
    changed: dict[str, Any] = {name: source.number(WIDTHS[name])}
    return header._replace(**changed)


def sound(header: Header, payload_bytes: int, max_chunk_bytes: int) -> bool:
    """Whether a chunk may be taken, said again in other words than the protocol's code."""
    if not (1 <= header.dtype <= len(DType) and 1 <= header.op <= len(ReduceOp)):
        return False
    if header.op == ReduceOp.MEAN and DType.BFLOAT16 < header.dtype < DType.BLOCK8:
        return False
    if header.op > ReduceOp.MEAN and header.dtype in {DType.BLOCK8, DType.BLOCK8_E4M3}:
        return False
    size = _ITEMSIZES[header.dtype]
    return (
        header.wire_dtype == header.dtype
        and header.sequence != NO_SEQUENCE
        and payload_bytes == header.nbytes <= max_chunk_bytes
        and (header.nbytes > 0 or header.total_bytes == 0)
        and header.total_bytes <= 1 << 48
        and header.offset <= header.total_bytes - header.nbytes
        and not any(n % size for n in (header.offset, header.nbytes, header.total_bytes))
    )


def run(data: bytes) -> None:
    """Read a frame: as it is, or with its beginning put right and one field changed."""
    source = Source(data)
    if source.chance(2):
        frame = source.take(HEADER_BYTES + source.below(4))
    else:
        kind = source.pick(tuple(MessageType))
        header = Header(kind)
        for _ in range(source.below(12)):
            header = mutate(header, source)
        frame = header.pack()
    _read(frame, source.number(32))


def _read(frame: bytes, payload_bytes: int) -> None:
    try:
        header = Header.unpack(frame)
    except ReductionError:
        check(not _is_ours(frame), "a sound header is read")
        return
    check(_is_ours(frame), "nothing but a sound header is read")
    cleared = bytes(0 if at == _SET_ASIDE else byte for at, byte in enumerate(frame))
    check(header.pack() == cleared, "a header that was read is written as it was")
    try:
        check_chunk(header, payload_bytes, MAX_CHUNK_BYTES)
        accepted = True
    except RemoteProtocolError:
        accepted = False
    expected = sound(header, payload_bytes, MAX_CHUNK_BYTES)
    check(accepted == expected, f"{header} with {payload_bytes} bytes is taken: {expected}")


def _is_ours(frame: bytes) -> bool:
    return (
        len(frame) == HEADER_BYTES
        and frame[:4] == MAGIC
        and frame[4] == VERSION_MAJOR
        and frame[5] in set(MessageType)
        and frame[6:8] == b"\0\0"
    )
