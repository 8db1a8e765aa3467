"""Every variant gives the results whose digests `golden.json` has: of this CPU, and emulated ones.

What other CPUs give is seen with a cross compiler and an emulator of single programs, where they
are installed (``make test-tools``).
"""

import ast
import io
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
from tests.commands import run_command
from tests.kernels import golden
from tests.kernels.computed import computed

ROOT = Path(__file__).parents[2]
TABLE = json.loads(golden.TABLE.read_text())
CASES = golden.cases()
KINDS = ("fold", "narrow", "keep", "widen", "divide")  # as the driver numbers them
# Compilers, emulators and CPUs; the variants that such a CPU runs, best first.
EMULATED = {
    "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64",), ["neon", "generic"]),
    "x86-64 of 2008": ("x86_64-linux-gnu-gcc", ("qemu-x86_64", "-cpu", "Nehalem"), ["generic"]),
    "x86-64 of 2013": (
        "x86_64-linux-gnu-gcc",
        ("qemu-x86_64", "-cpu", "Haswell"),
        ["avx2", "generic"],
    ),
}


def test_the_table_is_what_numpy_gives():
    assert list(TABLE) == list(CASES)
    for name, requests in CASES.items():
        assert golden.digest([golden.result(request) for request in requests]) == TABLE[name], name


@pytest.mark.parametrize("variant", kernels.variants())
def test_a_variant_of_this_cpu_gives_them(variant):
    for name, requests in CASES.items():
        results = [computed(variant, **request._asdict()) for request in requests]
        assert golden.digest(results) == TABLE[name], name


def packed(request):
    """Return a request as the driver reads it."""
    first = request.inputs[0]
    narrow = {"FLOAT16": 0, "BFLOAT16": 1, "BLOCK8": 2, "BLOCK8_E4M3": 3}
    if request.kind in ("fold", "divide"):
        dtype, count = int(DType[request.dtype]), len(first) // DType[request.dtype].itemsize
    else:
        floats = request.nbytes if request.kind == "widen" else len(first)
        dtype, count = narrow[request.dtype], floats // 4
    op = ReduceOp[request.op] if request.op else 0
    head = (KINDS.index(request.kind), dtype, op, len(request.inputs), count, len(first))
    return struct.pack("<4I3Qd", *head, request.nbytes, request.by) + b"".join(request.inputs)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Compiles the driver, once with each compiler, as the extensions are compiled."""
    folder = tmp_path_factory.mktemp("drivers")
    sources = [
        Path(__file__).with_name("driver.c"),
        *(ROOT / "reducer" / "kernels").glob("[df]*.c"),
        *(ROOT / "worker_client" / "staging").glob("cast_*.c"),
    ]
    flags = re.findall(r"^FLAGS \+= (\[.*\])$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    options = ["-static", "-O3", *ast.literal_eval(flags[0]), "-Werror", f"-I{ROOT}"]

    def driver(compiler):
        path = folder / compiler
        if not path.exists():
            command = [compiler, *options, *map(str, sources), "-lm", "-o", str(path)]
            built = run_command(*command)
            assert built.returncode == 0, built.stderr
        return str(path)

    return driver


@pytest.mark.extended("test_a_variant_of_this_cpu")
@pytest.mark.parametrize("cpu", EMULATED)
def test_another_cpu_chooses_by_what_it_has_and_gives_them(cpu, drivers):
    compiler, emulator, variants = EMULATED[cpu]
    for tool in (compiler, emulator[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: make test-tools")
    command = [*emulator, drivers(compiler)]
    assert run_command(*command).stdout.split() == variants
    requests = [request for group in CASES.values() for request in group]
    sent = b"".join(map(packed, requests))
    for variant in variants:
        done = subprocess.run(
            [*command, variant], input=sent, capture_output=True, check=True, timeout=100
        )
        said = io.BytesIO(done.stdout)
        for name, group in CASES.items():
            results = [said.read(request.nbytes) for request in group]
            assert golden.digest(results) == TABLE[name], (variant, name)
        assert said.read() == b""
