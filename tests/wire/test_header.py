"""Headers: what is packed is what is read, and nothing else gets through."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reducer.errors import ReductionError, RemoteProtocolError, VersionError
from reducer.wire.constants import HEADER_BYTES, MAX_CHUNK_BYTES, DType, MessageType, ReduceOp
from reducer.wire.header import Header, check_chunk, fingerprint


def unsigned(bits):
    return st.integers(0, (1 << bits) - 1)


NUMBERS = dict.fromkeys(Header._fields[2:], unsigned(64))
NUMBERS |= dict.fromkeys(("generation", "epoch", "nbytes", "rank", "since"), unsigned(32))
NUMBERS |= dict.fromkeys(("dtype", "op", "wire_dtype"), unsigned(8))
HEADERS = st.builds(Header, flags=st.just(0), type=st.sampled_from(MessageType), **NUMBERS)
CHUNK = Header(
    MessageType.CONTRIBUTION,
    sequence=3,
    total_bytes=4000,
    offset=1024,
    nbytes=512,
    dtype=DType.FLOAT32,
    op=ReduceOp.MEAN,
    wire_dtype=DType.FLOAT32,
)
BLOCKS = {"dtype": DType.BLOCK8, "wire_dtype": DType.BLOCK8, "total_bytes": 4096}
E4M3 = BLOCKS | {"dtype": DType.BLOCK8_E4M3, "wire_dtype": DType.BLOCK8_E4M3}


@given(HEADERS)
def test_round_trip(header):
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert Header.unpack(data) == header
    assert Header.unpack(memoryview(bytearray(data))) == header


@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_raises_nothing_else(header, at, flip):
    data = bytearray(header.pack())
    data[at] ^= flip
    with contextlib.suppress(ReductionError):
        check_chunk(Header.unpack(data), 512, MAX_CHUNK_BYTES)


def test_another_major_version_is_named():
    data = bytearray(Header(MessageType.HELLO).pack())
    data[4] = 9
    with pytest.raises(VersionError) as refusal:
        Header.unpack(data + b"longer than ours")
    assert (refusal.value.expected, refusal.value.got) == ("1.0", "9.x")


@pytest.mark.parametrize("length", [0, 5, 6, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_other_lengths_are_refused(length):
    with pytest.raises(RemoteProtocolError, match="96 bytes"):
        Header.unpack((Header(MessageType.PING).pack() * 2)[:length])


def test_flags_of_no_agreed_feature_are_refused():
    with pytest.raises(RemoteProtocolError, match="flags"):
        Header.unpack(Header(MessageType.PING, flags=1).pack())


def test_a_chunk_in_order_passes():
    check_chunk(CHUNK, 512, MAX_CHUNK_BYTES)
    check_chunk(CHUNK._replace(total_bytes=0, offset=0, nbytes=0), 0, MAX_CHUNK_BYTES)
    check_chunk(CHUNK._replace(total_bytes=1 << 48, offset=(1 << 48) - 512), 512, MAX_CHUNK_BYTES)
    for blocks in (BLOCKS, E4M3):
        check_chunk(CHUNK._replace(**blocks), 512, MAX_CHUNK_BYTES)


@pytest.mark.parametrize(
    ("change", "payload", "match"),
    [
        ({"dtype": 0}, 512, "dtype"),
        ({"dtype": 99}, 512, "dtype"),
        ({"op": 0}, 512, "op"),
        ({"dtype": DType.INT32}, 512, "MEAN is not defined"),
        ({**BLOCKS, "op": ReduceOp.MAX}, 512, "MAX is not defined for BLOCK8"),
        ({**E4M3, "op": ReduceOp.MIN}, 512, "MIN is not defined for BLOCK8_E4M3"),
        ({**E4M3, "offset": 128}, 512, "multiples of 256 for BLOCK8_E4M3"),
        ({**BLOCKS, "offset": 128}, 512, "multiples of 256 for BLOCK8"),
        ({**BLOCKS, "nbytes": 448}, 448, "multiples of 256 for BLOCK8"),
        ({**BLOCKS, "total_bytes": 4000}, 512, "multiples of 256 for BLOCK8"),
        ({"wire_dtype": DType.BFLOAT16}, 512, "wire compression"),
        ({"sequence": (1 << 64) - 1}, 512, "sequence"),
        ({}, 511, "announced 512 bytes, got 511"),
        ({"nbytes": 0}, 0, "empty chunk"),
        ({"total_bytes": (1 << 48) + 4}, 512, "a buffer has at most 281474976710656 bytes"),
        ({"nbytes": 8 << 20, "total_bytes": 1 << 30}, 8 << 20, "at most"),
        ({"offset": 3600}, 512, "ends after"),
        ({"offset": (1 << 64) - 512}, 512, "ends after"),
        ({"offset": 2}, 512, "multiples of 4"),
        ({"nbytes": 510}, 510, "multiples of 4"),
        ({"total_bytes": 4001}, 512, "multiples of 4"),
    ],
)
def test_every_field_of_a_chunk_is_checked(change, payload, match):
    with pytest.raises(RemoteProtocolError, match=match):
        check_chunk(CHUNK._replace(**change), payload, MAX_CHUNK_BYTES)


def test_fingerprints_are_those_of_the_specification():
    # As `printf job | b2sum -l 64` prints it.
    assert fingerprint("job") == int.from_bytes(bytes.fromhex("ae5ed715762bcf24"), "little")
