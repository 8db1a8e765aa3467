"""libsodium with chance that repeats: an input of a fuzzer does the same every time.

Its secrets are no secrets, so they can be used to seal what no honest peer would say.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from reducer.zmtp import sodium

_BUFFER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
_TWO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_THREE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
KEY_BYTES = 32
MAC_BYTES = 16


class Seeded:
    """The functions, some of them replaced.

    Attributes:
        side: whose chance it is; set it before a side of a connection does anything.
        made: the keys that were made of two, one of each side, since `restart`.
        addresses: of the functions, for `_zmtp.use`.
    """

    def __init__(self) -> None:
        self.side = ""
        self.made: list[bytes] = []
        self._counts: dict[str, int] = {}
        self._library: Any = ctypes.CDLL(sodium.library())
        self._kept = (_BUFFER(self._random), _TWO(self._pair), _THREE(self._beforenm))
        random, pair, beforenm = (
            ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._kept
        )
        replaced = {
            "randombytes_buf": random,
            "crypto_box_keypair": pair,
            "crypto_box_beforenm": beforenm,
        }
        self.addresses = tuple(
            replaced.get(name, address)
            for name, address in zip(sodium.FUNCTIONS, sodium.addresses(), strict=True)
        )

    def restart(self) -> None:
        """Let chance begin anew."""
        self._counts.clear()
        self.made.clear()

    def pair(self, name: str) -> tuple[bytes, bytes]:
        """Return the key pair of this name: public and secret."""
        public, secret = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
        self._library.crypto_box_seed_keypair(
            public, secret, hashlib.sha256(name.encode()).digest()
        )
        return public.raw, secret.raw

    def seal(self, text: bytes, nonce: bytes, key: bytes) -> bytes:
        """Return a box."""
        box = ctypes.create_string_buffer(len(text) + MAC_BYTES)
        self._library.crypto_box_easy_afternm(box, text, ctypes.c_ulonglong(len(text)), nonce, key)
        return box.raw

    def _next(self) -> str:
        count = self._counts[self.side] = self._counts.get(self.side, 0) + 1
        return f"{self.side} {count}"

    def _random(self, out: int, nbytes: int) -> None:
        drawn = hashlib.shake_128(self._next().encode()).digest(nbytes)
        ctypes.memmove(out, drawn, nbytes)

    def _pair(self, public: int, secret: int) -> int:
        for place, key in zip((public, secret), self.pair(self._next()), strict=True):
            ctypes.memmove(place, key, KEY_BYTES)
        return 0

    def _beforenm(self, key: int, public: int, secret: int) -> int:
        made: int = self._library.crypto_box_beforenm(
            ctypes.c_void_p(key), ctypes.c_void_p(public), ctypes.c_void_p(secret)
        )
        self.made.append(ctypes.string_at(key, KEY_BYTES))
        return made
