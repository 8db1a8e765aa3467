"""Two reducers for the examples, as processes of their own."""

import pytest

from reducer import local_pool


@pytest.fixture(scope="session")
def servers():
    """Addresses of two reducers."""
    with local_pool(2) as addresses:
        yield addresses
