"""Whose a job's name is: a key is bound to its first part (`docs/protocol.md`, section 10)."""

from __future__ import annotations

import re

MAX_OWNER_BYTES = 48  # leaves room for what workers append

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SEPARATORS = re.compile(r"[/.~]")


def owner(job: str) -> str:
    """Return the part of a job's name that a key can be bound to: all before the first / . or ~."""
    return _SEPARATORS.split(job, maxsplit=1)[0]


def is_owner(name: str) -> bool:
    """Whether a key can be bound to this name: letters, digits, - and _, at most 48 of them."""
    return len(name) <= MAX_OWNER_BYTES and _OWNER.fullmatch(name) is not None
