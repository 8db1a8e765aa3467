"""libsodium with chance that repeats: an input of a fuzzer does the same every time.

Its secrets are no secrets, so they can be used to seal what no honest peer would say.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING, Any

from tests.zmtp import _zmtp

if TYPE_CHECKING:
    from typing import Self

_NAME = ctypes.CFUNCTYPE(ctypes.c_char_p)
_RANDOM = ctypes.CFUNCTYPE(ctypes.c_uint32)
_FILL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
KEY_BYTES = 32
MAC_BYTES = 16


class _Chance(ctypes.Structure):
    """libsodium's `randombytes_implementation`, of which NULL leaves out what may be."""

    _fields_ = (
        ("name", _NAME),
        ("random", _RANDOM),
        ("stir", ctypes.c_void_p),
        ("uniform", ctypes.c_void_p),
        ("fill", _FILL),
        ("close", ctypes.c_void_p),
    )


class Seeded:
    """Chance within a `with` block, for all that uses libsodium in this process.

    Attributes:
        side: whose chance it is; set it before a side of a connection does anything.
    """

    def __init__(self) -> None:
        self.side = ""
        self._counts: dict[str, int] = {}
        self._secrets: list[bytes] = []  # of the pairs of connections, since `restart`
        self._library: Any = ctypes.CDLL(_zmtp.__file__)  # and what that is linked with
        self._chance = _Chance(
            _NAME(lambda: b"seeded"), _RANDOM(lambda: 0), None, None, _FILL(self._fill), None
        )

    def __enter__(self) -> Self:
        self._library.randombytes_set_implementation(ctypes.byref(self._chance))
        return self

    def __exit__(self, *_: object) -> None:
        usual = _Chance.in_dll(self._library, "randombytes_sysrandom_implementation")
        self._library.randombytes_set_implementation(ctypes.byref(usual))

    def restart(self) -> None:
        """Let chance begin anew."""
        self._counts.clear()
        self._secrets.clear()

    def pair(self, name: str) -> tuple[bytes, bytes]:
        """Return the key pair of this name: public and secret."""
        secret = hashlib.sha256(name.encode()).digest()
        return self._made(self._library.crypto_scalarmult_base, secret), secret

    def session_key(self) -> bytes:
        """Return what the two sides that drew pairs last seal frames with."""
        one, other = self._secrets[-2:]
        public = self._made(self._library.crypto_scalarmult_base, one)
        return self._made(self._library.crypto_box_beforenm, public, other)

    def seal(self, text: bytes, nonce: bytes, key: bytes) -> bytes:
        """Return a box."""
        box = ctypes.create_string_buffer(len(text) + MAC_BYTES)
        self._library.crypto_box_easy_afternm(box, text, ctypes.c_ulonglong(len(text)), nonce, key)
        return box.raw

    @staticmethod
    def _made(function: Any, *keys: bytes) -> bytes:
        key = ctypes.create_string_buffer(KEY_BYTES)
        function(key, *keys)
        return key.raw

    def _fill(self, out: int, nbytes: int) -> None:
        count = self._counts[self.side] = self._counts.get(self.side, 0) + 1
        drawn = hashlib.shake_128(f"{self.side} {count}".encode()).digest(nbytes)
        ctypes.memmove(out, drawn, nbytes)
        if nbytes == KEY_BYTES:  # nonces and cookies have other sizes
            self._secrets.append(drawn)
