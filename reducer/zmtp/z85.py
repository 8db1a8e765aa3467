"""Z85 (RFC 32), in which keys of 32 bytes are written: five digits for every four bytes."""

from __future__ import annotations

import struct

KEY_DIGITS = 40
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_PLACES = (4, 3, 2, 1, 0)  # of a digit among five: powers of 85


def encode(key: bytes) -> str:
    """Return a key of 32 bytes in Z85."""
    words = struct.unpack(">8I", key)
    return "".join(_DIGITS[word // 85**at % 85] for word in words for at in _PLACES)


def decode(text: str) -> bytes:
    """Return the 32 bytes of a key in Z85.

    Raises:
        ValueError: it is no key; the message does not repeat it.
    """
    digits = [_DIGITS.find(digit) for digit in text[: KEY_DIGITS + 1]]
    words = [
        sum(digit * 85**at for digit, at in zip(digits[begin:], _PLACES, strict=False))
        for begin in range(0, len(digits), 5)
    ]
    if len(digits) != KEY_DIGITS or min(digits) < 0 or max(words) >= 1 << 32:
        raise ValueError(f"a key has {KEY_DIGITS} characters of Z85")
    return struct.pack(">8I", *words)
