"""A reducer of two threads in this process, and the HTTP port of its observer."""

import pytest

from tests.conftest import reducer_here
from tests.reducer.asked import ask, port_of
from tests.waits import eventually


@pytest.fixture(scope="module")
def server():
    with reducer_here(threads=2) as server:
        yield server


@pytest.fixture(scope="module")
def port(server):
    with port_of(server.observer) as address:
        eventually(lambda: ask(address, "/readyz").code == 200)
        yield address
