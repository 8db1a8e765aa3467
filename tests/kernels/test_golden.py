"""Every variant gives the results whose digests `golden.json` has: of this CPU, and emulated ones.

What other CPUs of this kind give is seen with an emulator of single programs, where it is installed
(``make test-tools``); `tests/wheels/test_aarch64.py` has 64-bit Arm.
"""

import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reducer import kernels
from tests.kernels import golden
from tests.kernels.computed import computed

ROOT = Path(__file__).parents[2]
TABLE = json.loads(golden.TABLE.read_text())
CASES = golden.cases()


def test_the_table_is_what_numpy_gives():
    assert list(TABLE) == list(CASES)
    for name, requests in CASES.items():
        assert golden.digest([golden.result(request) for request in requests]) == TABLE[name], name


@pytest.mark.parametrize("variant", kernels.variants())
def test_a_variant_of_this_cpu_gives_them(variant):
    for name, requests in CASES.items():
        results = [computed(variant, **request._asdict()) for request in requests]
        assert golden.digest(results) == TABLE[name], name


@pytest.mark.extended("test_a_variant_of_this_cpu")
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("qemu-x86_64"),
    reason="needs an x86-64 and qemu-x86_64: make test-tools",
)
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="no sanitizer runs in the emulator")
@pytest.mark.parametrize(
    ("cpu", "variants"),
    [("Nehalem", ["generic", "numpy"]), ("Haswell", ["avx2", "generic", "numpy"])],
)
def test_another_cpu_chooses_by_what_it_has_and_gives_them(cpu, variants):
    requests = [request._asdict() for group in CASES.values() for request in group]
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", cpu, sys.executable, "-m", "tests.kernels.computed"],
        input=pickle.dumps(requests),
        capture_output=True,
        check=True,
        cwd=ROOT,
        timeout=200,
    )
    found = pickle.loads(done.stdout)  # noqa: S301 (of our own)
    assert list(found) == variants
    for variant, results in found.items():
        left = iter(results)
        for name, group in CASES.items():
            assert golden.digest([next(left) for _ in group]) == TABLE[name], (variant, name)
