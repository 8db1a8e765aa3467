"""Proxies, and that nothing of them is left."""

import threading

import pytest

from tests.faults.ends import Ends


@pytest.fixture
def ends():
    before = set(threading.enumerate())
    made = Ends()
    with made.stack:
        yield made
    assert set(threading.enumerate()) <= before
