"""What `make release` has just built: what wheels need, how large they are, and that they run.

Each Python that is installed runs this machine's wheel in an environment of its own, where no
compiler is found.
"""

import platform
import re
import shutil
import sys
from zipfile import ZipFile

import pytest

from tests.commands import reduced_by, run_command
from tests.wheels.built import COMPILERS, DIST, OUTSIDE, wheel_of

MOST_BYTES = 3_000_000
IMPORT_S = 0.25  # promised to those who import it on every start
PYTHONS = [f"python3.{minor}" for minor in range(11, 15)]
README = DIST.parent / "README.md"
MACHINES = {platform.machine(), *COMPILERS}

# Kernels are chosen by the CPU.
ALONE = """
import importlib.util, shutil
from reducer import kernels
assert importlib.util.find_spec("torch") is None
assert shutil.which("gcc") is None and shutil.which("cc") is None
has = set(open("/proc/cpuinfo").read().split())
best = ["generic", "numpy"]
if "asimd" in has:
    best.insert(0, "neon")
if {"avx2", "f16c"} <= has:
    best.insert(0, "avx2")
if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has:
    best.insert(0, "avx512")
assert kernels.variants() == tuple(best), kernels.variants()
"""
IMPORT = """
import sys, time
begin = time.perf_counter()
import worker_client
print(time.perf_counter() - begin)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request, tmp_path_factory):
    """The commands of an environment that holds what was built and what it asks for."""
    wheel = wheel_of(platform.machine())
    interpreter = shutil.which(request.param)
    if interpreter is None or run_command(interpreter, "--version").returncode:
        pytest.skip(f"needs {request.param}")
    home = tmp_path_factory.mktemp(request.param)
    made = run_command(interpreter, "-m", "venv", "--without-pip", home, env=OUTSIDE)
    assert made.returncode == 0, made.stderr
    commands = home / "bin"
    pip = [sys.executable, "-m", "pip", "--python", commands / "python"]
    done = run_command(*pip, "install", "-q", "--only-binary", ":all:", wheel, env=OUTSIDE)
    assert done.returncode == 0, done.stderr
    return commands


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_one_wheel_serves_every_python_on_older_systems(machine):
    wheel = wheel_of(machine)
    name = rf"reduction_server-[\w.]+-cp311-abi3-manylinux_2_(\d+)_{machine}\.whl"
    found = re.fullmatch(name, wheel.name)
    assert found
    (claimed,) = re.findall(r"glibc 2\.(\d+) or\slater", README.read_text())
    assert int(found[1]) <= int(claimed)
    assert wheel.stat().st_size <= MOST_BYTES
    with ZipFile(wheel) as packed:
        names = packed.namelist()
        compiled = {name: packed.read(name) for name in names if name.endswith(".so")}
    assert compiled
    tagless = {name for name in compiled if not name.endswith(".abi3.so")}
    assert tagless == {"worker_client/nccl/libnccl-net-reduction.so"}  # which NCCL loads
    assert not [name for name, code in compiled.items() if b"failpoint_arm" in code]
    assert not [name for name in names if name.startswith("tests/")]
    assert {"reducer/py.typed", "worker_client/py.typed"} <= set(names)
    assert [name for name in names if name.startswith("reduction_server.libs/libsodium-")]


@pytest.mark.timeout(400)
def test_it_runs_with_this_python_and_without_a_compiler(installed):
    said = reduced_by(
        installed / "python",
        code=ALONE,
        command=[installed / "reducer"],
        env={**OUTSIDE, "PATH": str(installed)},
        cwd=installed,
    )
    assert said == "compiled [0. 1. 2. 3. 4.]"


def test_an_import_is_quick(installed):
    command = (installed / "python", "-c", IMPORT)
    took = [float(run_command(*command, env=OUTSIDE, cwd=installed).stdout) for _ in range(5)]
    assert min(took) <= IMPORT_S
