"""Proxies, and that nothing of them is left."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.faults.ends import Ends

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = set(threading.enumerate())
    made = Ends()
    with made.stack:
        yield made
    assert set(threading.enumerate()) <= before
