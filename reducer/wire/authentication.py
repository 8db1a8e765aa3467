"""How both ends of a link prove that they know their job's secret (`README.md`, section 10)."""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING

from reducer.wire.constants import NONCE_DIGITS

if TYPE_CHECKING:
    from reducer.wire.header import Header
    from reducer.wire.messages import Hello
    from reducer.wire.states import Role

_SAID = struct.Struct("<5Q")


def nonce(secret: bytes, *parts: bytes) -> str:
    """Return 32 hexadecimal digits that nobody else can guess; other parts give others."""
    said = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.new(secret, b"nonce\0" + said, "sha256").hexdigest()[:NONCE_DIGITS]


def prove(secret: bytes, speaker: Role, header: Header, hello: Hello, challenge: str) -> str:
    """Return what shows that one end of a link knows the secret, 64 hexadecimal digits.

    Args:
        secret: of the job.
        speaker: which end.
        header: of the HELLO.
        hello: the HELLO, whose `auth` begins with the worker's nonce.
        challenge: the reducer's nonce.
    """
    said = _SAID.pack(header.job, header.generation, header.rank, hello.reducer_index, hello.lane)
    nonces = f"{speaker.value}\0{hello.auth[:NONCE_DIGITS]}{challenge}"
    return hmac.new(secret, nonces.encode() + said, "sha256").hexdigest()


def proves(shown: str, expected: str) -> bool:
    """Compare proofs; how long it takes tells nothing of the right one."""
    return hmac.compare_digest(shown.encode(), expected.encode())
