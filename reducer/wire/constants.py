"""The protocol's numbers on one screen; `docs/protocol.md` says what they mean.

A code that has been published is never given another meaning.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

MAGIC = b"RDSV"
VERSION_MAJOR = 1  # peers of another major version are refused
VERSION_MINOR = 0  # minor versions interoperate: each uses the features both announced

PORT = 5555  # where a reducer listens, unless it is told otherwise
HEADER_BYTES = 96
TYPE_AT = 5  # where a header says what type of message it is
SHARD_ALIGNMENT = 64  # bytes; a cache line, and a multiple of the size of smaller elements
BLOCK_VALUES = 252  # of one block, whose size so is a power of two
MAX_CHUNK_BYTES = 4 << 20  # heartbeats are seen only between frames, so a frame must be short
MAX_TOTAL_BYTES = 1 << 48  # of a buffer; more than any machine has
MAX_BODY_BYTES = 4096  # of a control message's JSON
MAX_JOB_NAME_BYTES = 128
NONCE_DIGITS, PROOF_DIGITS = 32, 64  # hexadecimal, of HELLO, CHALLENGE and WELCOME
MAX_WORLD_SIZE = 1 << 16
MAX_LANES = 64  # threads of one reducer
MAX_STREAMS = 16  # connections of one link
PLACES = 128  # all-reduces of one call: its numbers are this many times its own, and those after
MAX_ROUNDS_AHEAD = PLACES << 14  # a worker's sequence numbers stay this close to its watermark
MIN_COST = 1024  # bytes that even the smallest contribution takes of a window
SPARE_CHUNKS = 4  # in flight beyond a window: each preceded all others in flight when it was sent
PEER_TIMEOUT_MS = 1000  # that a peer may be silent before it is given up, if its job does not say
SHORTEST_PEER_TIMEOUT_MS, LONGEST_PEER_TIMEOUT_MS = 500, 60_000
REDUCER_HEARTBEAT_MS = 200  # between two of a reducer's
FAR_S = 0.01  # the round trip from which on a network is a far one
RESUME_S = 1.0  # a far connection may go on so long after its socket broke, and five round trips
NO_SEQUENCE = (1 << 64) - 1  # the message concerns the connection, not one all-reduce


class MessageType(IntEnum):
    """What a message asks or says."""

    HELLO = 1
    WELCOME = 2
    CONTRIBUTION = 3
    RESULT = 4
    ABORT = 5
    ERROR = 6
    GOODBYE = 7
    PING = 8
    STRAGGLERS = 9
    SHARD_MAP = 10
    RETAINED = 11
    CREDIT = 12
    CHALLENGE = 13
    STREAM = 14
    RESUME = 15


class DType(IntEnum):
    """Element types, little-endian on the wire."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    BLOCK8 = 9
    BLOCK8_E4M3 = 10

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZES[self]

    @property
    def is_floating(self) -> bool:
        """Whether its values are floating-point numbers."""
        return self <= DType.BFLOAT16 or self.is_block

    @property
    def is_block(self) -> bool:
        """Whether an element is a block of values that have one scale."""
        return self >= DType.BLOCK8

    @property
    def values(self) -> int:
        """Values per element."""
        return BLOCK_VALUES if self.is_block else 1

    def nbytes(self, count: int) -> int:
        """Return the size of the elements that hold `count` values, in bytes."""
        return -(-count // self.values) * self.itemsize

    def defines(self, op: ReduceOp) -> bool:
        """Whether a reduction is defined for the type."""
        if self.is_block:
            return op <= ReduceOp.MEAN
        return op is not ReduceOp.MEAN or self.is_floating


_ITEMSIZES = {
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT8: 1,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.UINT8: 1,
    DType.BLOCK8: 4 + BLOCK_VALUES,  # after their common scale
    DType.BLOCK8_E4M3: 4 + BLOCK_VALUES,
}


class ReduceOp(IntEnum):
    """How contributions combine: a left fold in rank order; `DType.defines` says for which."""

    SUM = 1
    MEAN = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class ErrorCode(IntEnum):
    """One code per leaf of `reducer.errors`; the sentences are in `docs/protocol.md`."""

    PROTOCOL = 1
    VERSION = 2
    UNKNOWN_PEER = 3
    STALE_GENERATION = 4
    DUPLICATE_RANK = 5
    MISMATCH = 6
    RANK_LOST = 7
    REDUCER_LOST = 8
    TIMEOUT = 9
    CAPACITY = 10
    AUTH = 11
    FAILED = 12


class Feature(IntFlag):
    """Optional features of the protocol: two peers use those that both have announced."""

    CREDIT = 1  # windows may grow while a worker is a member
    STREAMS = 2  # a link may have several connections
    RESUME = 4  # a far connection whose socket breaks goes on over another one
    LEAVES = 8  # sums of leaves (reducer.wire.leaves)


# What takes no more of a transport than to send.
FEATURES = Feature.CREDIT | Feature.LEAVES
COMPILED_FEATURES = FEATURES | Feature.STREAMS | Feature.RESUME
