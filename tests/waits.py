"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 20.0  # a busy machine may take some
LOOK_S = 0.005


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it never came to that.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s"
        time.sleep(LOOK_S)
