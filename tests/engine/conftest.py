"""Reducers and sessions of both implementations."""

from __future__ import annotations

import pytest

from tests.engine.driven import Driven, join, joined
from tests.engine.twins import IMPLEMENTATIONS
from tests.engine.words import Reducer, with_ranks


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reducer(implementation: str) -> Reducer:
    """Two ranks of one job, both welcome."""
    return with_ranks(implementation, 2)


@pytest.fixture
def session(implementation: str) -> Driven:
    """Rank 1 of 2, with two reducers and chunks of 64 bytes."""
    session = Driven(implementation, 1, 2, ("a:1", "b:2"), 4096, 64)
    assert not session.joined
    for index in range(2):
        assert join(session, index) == []
    assert session.joined
    return session


@pytest.fixture
def lone(implementation: str) -> Driven:
    """Rank 1 of 2, with one reducer."""
    return joined(implementation, 1, 2, ("a:1",), 1 << 20, 64)


@pytest.fixture
def newcomer(implementation: str) -> Driven:
    """The only rank, which has one reducer and has not joined."""
    return Driven(implementation, 0, 1, ("a:1",), 4096)
