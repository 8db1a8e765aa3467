"""Two reducers for the examples, as processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reducer import local_pool
from tests.frameworks import cases

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def servers() -> Iterator[list[str]]:
    """Addresses of two reducers."""
    with local_pool(2) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, servers: list[str]) -> dict[str, list[str | None]]:
    """What the module's `CASES` say at each rank, by their names."""
    return cases.run(request.module.CASES, servers)
