"""The header of a message, packed and unpacked in Python; in C the frame is the struct itself."""

import struct
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, check_chunk

pytestmark = pytest.mark.benchmark(max_time=0.2)

CHUNK = 512 << 10

FIELDS: dict[str, Any] = {
    "type": MessageType.CONTRIBUTION,
    "flags": 0,
    "job": 0x0123456789ABCDEF,
    "generation": 3,
    "epoch": 5,
    "sequence": 1 << 40,
    "watermark": (1 << 40) - 2,
    "total_bytes": 64 << 20,
    "offset": 7 * CHUNK,
    "nbytes": CHUNK,
    "rank": 11,
    "dtype": DType.FLOAT32,
    "op": ReduceOp.SUM,
    "wire_dtype": DType.FLOAT32,
    "since": 7,
    "tag": 0xFEDCBA9876543210,
    "window": 0,
    "history": 0x9E3779B97F4A7C15,
}
# By the table of docs/protocol.md, section 2: the byte before `since` is set aside.
FRAME = struct.pack("<4sBBHQIIQQQQIIBBBxIQQQ", b"RDSV", 1, *FIELDS.values())


def describe(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "header, 96 bytes"
    benchmark.extra_info["nbytes"] = len(FRAME)


def test_pack(benchmark: BenchmarkFixture) -> None:
    header = Header(**FIELDS)
    describe(benchmark)
    assert benchmark(header.pack) == FRAME


def test_unpack(benchmark: BenchmarkFixture) -> None:
    describe(benchmark)
    assert benchmark(Header.unpack, FRAME)._asdict() == FIELDS


def test_unpack_and_check(benchmark: BenchmarkFixture) -> None:
    """What the plain loops do with every contribution and result."""

    def read(data: bytes) -> Header:
        header = Header.unpack(data)
        check_chunk(header, CHUNK, CHUNK)
        return header

    describe(benchmark)
    assert benchmark(read, FRAME)._asdict() == FIELDS
