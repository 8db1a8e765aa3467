"""The records of compiled rounds: where strangers' offsets lie, and what memory they take."""

import ast
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
N = 2000
MODULUS = 1 << 64
LARGEST = 1 << 48  # that an offset may be
GOLDEN = 0x9E3779B97F4A7C15  # a multiplier that everybody knows: 2^64 over the golden ratio


def compiled(folder, *arguments):
    """Compile a program of this folder, as the extensions are compiled; return its path."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    program = str(folder / "program")
    flags = re.findall(r"^FLAGS = (\[.*\])$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    options = ["-O2", *ast.literal_eval(flags[0]), "-Werror", f"-I{ROOT}"]
    built = run_command("cc", *options, *arguments, "-o", program, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return program


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """Count the entries that are passed over to find each of these keys once."""
    program = compiled(tmp_path_factory.mktemp("probes"), "tests/engine/probes.c")

    def count(keys):
        packed = b"".join(key.to_bytes(8, "little") for key in keys)
        return int(subprocess.run([program], input=packed, capture_output=True, check=True).stdout)

    return count


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A program that makes records of rounds; see `records.c`."""
    folder = tmp_path_factory.mktemp("records")
    wrapped = "-Wl,--wrap=calloc,--wrap=realloc"
    return compiled(folder, "tests/engine/records.c", "reducer/engine/slots.c", wrapped)


def colliding():
    """Keys whose products with the known multiplier share bits 32 to 52."""
    inverse = pow(GOLDEN, -1, MODULUS)
    chance = random.Random(0)
    return [(number << 52 | chance.getrandbits(32)) * inverse % MODULUS for number in range(N)]


def neighbours():
    """Offsets in bounds whose products with the known multiplier begin with the same bits."""
    # Multiples of a number whose product is small, by the continued fraction of the ratio.
    small = min(range(1, 1 << 16), key=lambda offset: offset * GOLDEN % MODULUS)
    return [small * (number + 1) for number in range(N)]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(colliding(), id="one place under a known multiplier"),
        pytest.param(neighbours(), id="neighbours under a known multiplier"),
        pytest.param([at << 18 for at in range(N)], id="chunks of 256 KiB"),
        pytest.param([at << 37 for at in range(N)], id="chunks as far apart as they may be"),
        pytest.param(list(range(N)), id="bytes"),
    ],
)
def test_no_offsets_are_far_from_home(keys, probes):
    assert len(set(keys)) == N
    # Each program draws a multiplier: one in thousands may fit these keys badly.
    counts = sorted(probes(keys) for _ in range(3))
    assert counts[1] < 10 * N, counts


@pytest.mark.parametrize("world_size", [1, 2, 300])
@pytest.mark.parametrize("slots", [1, 8, 1023, 1024, 1500])
def test_records_take_no_more_than_is_counted(world_size, slots, records):
    # At 1024 slots the map has just grown. What malloc keeps for a thread seems to be in use.
    nothing_kept = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    said = run_command(records, world_size, slots, env=nothing_kept).stdout.splitlines()
    assert [line.split()[0] for line in said] == ["open", "done", "dropped"]
    for line in said:
        in_use, counted = map(int, line.split()[1:])
        assert in_use <= counted, said


def test_for_want_of_memory_nothing_is_changed_and_nothing_leaks(records):
    assert run_command(records).stdout == "unchanged\n"
