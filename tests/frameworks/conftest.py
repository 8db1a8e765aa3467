"""Two reducers for the examples, as processes of their own."""

import pytest

from reducer import local_pool
from tests.frameworks import cases


@pytest.fixture(scope="session")
def servers():
    """Addresses of two reducers."""
    with local_pool(2) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def results(request, servers):
    """What the module's `CASES` say at each rank, by their names."""
    return cases.run(request.module.CASES, servers)
