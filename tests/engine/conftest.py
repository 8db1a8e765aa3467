"""Reducers of both implementations."""

from __future__ import annotations

import pytest

from reducer.wire.header import Header
from tests.engine.twins import IMPLEMENTATIONS
from tests.engine.words import M, Reducer


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reducer(implementation: str) -> Reducer:
    """Two ranks of one job, both welcome."""
    reducer = Reducer(implementation)
    for rank in range(2):
        (send,) = reducer.hello(rank)
        assert Header.unpack(send.header).type is M.WELCOME
    return reducer
