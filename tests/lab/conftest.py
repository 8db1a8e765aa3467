"""Labs for tests, and what the lab itself must not be asked about: whether this machine can."""

import os
import shutil
import subprocess

import psutil
import pytest

from lab import Lab


@pytest.fixture(scope="session")
def namespaces():
    """Skip where no lab can be; a lab that fails elsewhere is a failed test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            pytest.skip(f"needs `{tool}`: make test-tools")
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        pytest.skip("the kernel refuses namespaces")


@pytest.fixture(scope="module")
def lab(namespaces):
    """Three hosts at 100 Mbit/s, shared by a module's tests; they leave its links as they were."""
    with Lab(hosts=3, mbit=100) as shared:
        yield shared


def own_keeper():
    """The process that keeps the lab that this one has made last."""
    return [child for child in psutil.Process().children() if "keep" in child.cmdline()][-1]
