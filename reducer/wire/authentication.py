"""How both ends prove that they know their job's secret (`docs/protocol.md`, section 10)."""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import TYPE_CHECKING

from reducer.wire.constants import NONCE_DIGITS

if TYPE_CHECKING:
    from reducer.wire.header import Header
    from reducer.wire.messages import Hello
    from reducer.wire.states import Role

_SAID = struct.Struct("<5Q")
_RESUMED = struct.Struct("<3Q")


def nonce() -> str:
    """Return 32 random hexadecimal digits."""
    return secrets.token_hex(NONCE_DIGITS // 2)


def prove(  # noqa: PLR0917 (one after the other, as they are hashed)
    secret: bytes, speaker: Role, header: Header, hello: Hello, challenge: str, address: str
) -> str:
    """Return what shows that one end of a link knows the secret, 64 hexadecimal digits.

    `auth` of the HELLO begins with the worker's nonce, and `challenge` is the reducer's. `address`,
    ``host:port``, is that of the reducer's thread as ranks are told it: so nobody who has taken
    another reducer's port can pass the proof on.
    """
    said = _SAID.pack(header.job, header.generation, header.rank, hello.reducer_index, hello.lane)
    nonces = f"{speaker.value}\0{hello.auth[:NONCE_DIGITS]}{challenge}"
    return hmac.new(secret, nonces.encode() + said + address.encode(), "sha256").hexdigest()


def prove_stream(secret: bytes, ticket: str, number: int) -> str:
    """Return what shows that who says STREAM knows the secret, 64 hexadecimal digits."""
    return hmac.new(secret, f"stream\0{ticket}{number}".encode(), "sha256").hexdigest()


def prove_resume(secret: bytes, ticket: str, number: int, attempt: int, offset: int) -> str:
    """Return what shows that who says RESUME knows the secret, 64 hexadecimal digits.

    `offset` are the bytes that the sender of this RESUME has read over that connection.
    """
    said = f"resume\0{ticket}".encode() + _RESUMED.pack(number, attempt, offset)
    return hmac.new(secret, said, "sha256").hexdigest()


def proves(shown: str, expected: str) -> bool:
    """Compare proofs; how long it takes tells nothing of the right one."""
    return hmac.compare_digest(shown.encode(), expected.encode())
