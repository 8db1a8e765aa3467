"""Reducers of both implementations, and sessions."""

import pytest

from tests.engine.driven import Driven, join, joined
from tests.engine.twins import IMPLEMENTATIONS
from tests.engine.words import with_ranks


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def reducer(implementation):
    """Two ranks of one job, both welcome."""
    return with_ranks(implementation, 2)


@pytest.fixture
def session():
    """Rank 1 of 2, with two reducers and chunks of 64 bytes."""
    session = Driven(1, 2, ("a:1", "b:2"), 4096, 64)
    assert not session.joined
    for index in range(2):
        assert join(session, index) == []
    assert session.joined
    return session


@pytest.fixture
def lone():
    """Rank 1 of 2, with one reducer."""
    return joined(1, 2, ("a:1",), 1 << 20, 64)


@pytest.fixture
def newcomer():
    """The only rank, which has one reducer and has not joined."""
    return Driven(0, 1, ("a:1",), 4096)
