"""The header of a message, packed and unpacked in Python; in C the frame is the struct itself."""

from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, check_chunk

pytestmark = pytest.mark.benchmark(max_time=0.2)

CHUNK = 512 << 10

# The table of reducer/wire/README.md, section 2; its set-aside byte is zero.
FRAME = np.dtype(
    {
        "names": [
            *("magic", "version", "type", "flags", "job", "generation", "epoch", "sequence"),
            *("watermark", "total_bytes", "offset", "nbytes", "rank", "dtype", "op", "wire_dtype"),
            *("since", "tag", "window", "history"),
        ],
        "formats": [
            *("S4", "u1", "u1", "<u2", "<u8", "<u4", "<u4", "<u8"),
            *("<u8", "<u8", "<u8", "<u4", "<u4", "u1", "u1", "u1"),
            *("<u4", "<u8", "<u8", "<u8"),
        ],
        "offsets": [0, 4, 5, 6, 8, 16, 20, 24, 32, 40, 48, 56, 60, 64, 65, 66, 68, 72, 80, 88],
        "itemsize": 96,
    }
)
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


def frame() -> bytes:
    """Return the 96 bytes of a contribution's header."""
    written = np.zeros(1, FRAME)
    for name, value in {"magic": b"RDSV", "version": 1, **FIELDS}.items():
        written[name] = value
    return written.tobytes()


def describe(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "header, 96 bytes"
    benchmark.extra_info["nbytes"] = FRAME.itemsize


def test_pack(benchmark: BenchmarkFixture) -> None:
    header = Header(**FIELDS)
    describe(benchmark)
    assert benchmark(header.pack) == frame()


def test_unpack(benchmark: BenchmarkFixture) -> None:
    describe(benchmark)
    assert benchmark(Header.unpack, frame())._asdict() == FIELDS


def test_unpack_and_check(benchmark: BenchmarkFixture) -> None:
    """What the plain loops do with every contribution and result."""

    def read(data: bytes) -> Header:
        header = Header.unpack(data)
        check_chunk(header, CHUNK, CHUNK)
        return header

    describe(benchmark)
    assert benchmark(read, frame())._asdict() == FIELDS
