"""Results as the commands write them, without measuring anything."""

from pathlib import Path

import pytest

from bench.results import read

KINDS = ("allreduce", "soak", "ddp", "chaos", "micro")
FILES = [Path(__file__).with_name("results") / f"{kind}.json" for kind in KINDS]


@pytest.fixture
def results():
    """What each kind of benchmark has found, by its name."""
    return {file.stem: read(file) for file in FILES}
