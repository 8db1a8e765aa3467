"""Two reducers for the examples, as processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reducer import local_pool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def servers() -> Iterator[list[str]]:
    """Addresses of two reducers."""
    with local_pool(2) as addresses:
        yield addresses
