"""Labs for tests, and what the lab itself must not be asked about: whether this machine can."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no lab can be; a lab that fails elsewhere is a failed test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            pytest.skip(f"needs `{tool}`: make test-tools")
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        pytest.skip("the kernel refuses namespaces")


@pytest.fixture(scope="module")
def lab(namespaces: None) -> Iterator[Lab]:
    """Three hosts at 100 Mbit/s, shared by a module's tests; they leave its links as they were."""
    with Lab(hosts=3, mbit=100) as shared:
        yield shared
