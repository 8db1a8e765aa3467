"""What pytest-benchmark's files say of the machine, besides what they say by themselves."""

from typing import Any

import pytest

from bench.results import processors_in_use

LOAD = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """Measure how busy the machine is before anything is timed."""
    if config.getoption("--benchmark-only"):
        config.stash[LOAD] = processors_in_use()


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Add that to the file; the report warns if it was much."""
    if LOAD in config.stash:
        machine_info["load"] = config.stash[LOAD]
