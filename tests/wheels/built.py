"""The wheels that `make release` has just built."""

import os
import platform
import shutil
from pathlib import Path

import pytest

DIST = Path(__file__).parents[2] / "dist"
COMPILERS = {"aarch64": "aarch64-linux-gnu-gcc"}  # of architectures that are not this one
# Of processes that are not to find this checkout.
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def wheel_of(machine):
    """Return the wheel for `machine`, or skip the test that needs it where it is not built."""
    if not list(DIST.glob("*.whl")):
        pytest.skip("needs wheels: run make release")
    compiler = COMPILERS.get(machine)
    if machine != platform.machine() and (compiler is None or shutil.which(compiler) is None):
        pytest.skip(f"needs {compiler}: make cross-tools, then make release")
    (wheel,) = DIST.glob(f"*_{machine}.whl")
    return wheel
