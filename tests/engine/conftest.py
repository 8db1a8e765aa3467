"""Reducers and sessions of both implementations."""

from __future__ import annotations

import pytest

from reducer.wire.header import Header
from tests.engine.driven import Driven, join
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


@pytest.fixture
def session(implementation: str) -> Driven:
    """Rank 1 of 2, with two reducers and chunks of 64 bytes."""
    session = Driven(implementation, 1, 2, ("a:1", "b:2"), 4096, 64)
    assert not session.joined
    for index in range(2):
        assert join(session, index) == []
    assert session.joined
    return session
