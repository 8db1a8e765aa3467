"""Whoever comes to a reducer's port: the job goes on, and connections end."""

from contextlib import ExitStack

import pytest

from hostile.zmtp import STRANGERS, dial
from tests.security.conftest import reduces
from tests.waits import eventually


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_shown_out(reducer, honest, kind):
    before = reducer.files
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(STRANGERS[kind](reducer.address))
        assert reduces(honest)
        # They are still there: it is the reducer that closes them.
        eventually(lambda: reducer.files <= before)
    assert reduces(honest)


def test_idle_connections_cost_nothing_but_themselves(reducer, honest):
    before, resident = reducer.files, reducer.resident
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(dial(reducer.address))
        assert reduces(honest)
        eventually(lambda: reducer.files <= before)
    assert reducer.resident < resident + (32 << 20)


def test_members_are_not_shown_out(reducer, honest):
    before = reducer.files
    with dial(reducer.address):
        eventually(lambda: reducer.files > before)
        eventually(lambda: reducer.files == before)  # longer than a stranger may stay
    assert reduces(honest)
