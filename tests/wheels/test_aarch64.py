"""The wheel for 64-bit Arm, run by Debian's Python for such CPUs.

An emulator of single programs runs both where it is installed: ``make cross-tools``. The Python was
unpacked by `make release`.
"""

import json
import pickle
import shutil
import subprocess
import sys

import pytest

from tests.commands import reduced_by, run_command
from tests.kernels import computed, golden
from tests.wheels.built import DIST, OUTSIDE, wheel_of

UNPACKED = DIST.parent / "build/aarch64-linux-gnu"
EMULATOR = "qemu-aarch64"
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 40))]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The command of an emulated Python that has the wheel and what it asks for."""
    wheel = wheel_of("aarch64")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {EMULATOR}: make cross-tools, on a Debian")
    root = tmp_path_factory.mktemp("aarch64") / "root"
    shutil.copytree(UNPACKED, root, symlinks=True, ignore=shutil.ignore_patterns("apt"))
    found = root / "usr" / "bin" / "python3"
    version = found.resolve().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    pip += ["--target", root / "usr/lib/python3/dist-packages", "--python-version", version]
    pip += [f"--platform={platform}" for platform in PLATFORMS]
    done = run_command(*pip, wheel, env=OUTSIDE)
    assert done.returncode == 0, done.stderr
    return [EMULATOR, "-L", root, found]


@pytest.mark.timeout(600)
def test_its_kernels_and_casts_give_the_bits_of_all_others(python):
    cases, digests = golden.cases(), json.loads(golden.TABLE.read_text())
    requests = [request._asdict() for group in cases.values() for request in group]
    done = subprocess.run(
        [*map(str, python), computed.__file__],
        input=pickle.dumps(requests),
        env=OUTSIDE,
        stdout=subprocess.PIPE,
        check=True,
    )
    results = pickle.loads(done.stdout)  # noqa: S301 (of the program that was just run)
    assert list(results) == ["neon", "generic", "numpy"]
    for variant, given in results.items():
        left = iter(given)
        for name, group in cases.items():
            assert golden.digest([next(left) for _ in group]) == digests[name], (variant, name)


@pytest.mark.timeout(600)
def test_a_reducer_and_a_rank_run(python, tmp_path):
    assert reduced_by(*python, env=OUTSIDE, cwd=tmp_path) == "compiled [0. 1. 2. 3. 4.]"
