"""A debug build apart: a copy of the tree whose extensions carry the sanitizers.

``python -m fuzz.sanitizers`` builds it, runs the tests of what is compiled there, and feeds it the
corpus and changed inputs. The tree's own extensions stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fuzz.targets import TARGETS

TREE = Path("build/sanitized")
# What goes through compiled code: kernels, slots, loops, flights, casts and ZMTP.
TESTS = (
    "tests/kernels",
    "tests/engine/test_engine.py",
    "tests/engine/test_intruders.py",
    "tests/engine/test_away.py",
    "tests/engine/test_claims.py",
    "tests/engine/test_comebacks.py",
    "tests/engine/test_failover.py",
    "tests/engine/test_lateness.py",
    "tests/engine/test_session.py",
    "tests/worker_client/test_flight.py",
    "tests/worker_client/test_casts.py",
    "tests/worker_client/test_tensor_queue.py",
    "tests/transport",
    "tests/zmtp",
    "tests/fuzz",
)
_COPIED = ("reducer", "worker_client", "fuzz", "tests", "bench", "lab")
_COPIED_TOO = ("setup.py", "pyproject.toml", "README.md", "LICENSE")  # setup.py reads the others


def main() -> int:
    """Build, test and fuzz; 1 if anything was found."""
    inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    copy(TREE)
    build(TREE)
    failed = run(TREE, "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=600", *TESTS)
    for name in TARGETS:
        failed |= run(TREE, "fuzz", name, "--blind", "--runs", str(inputs))
    print("sanitizers: something was found" if failed else "sanitizers: nothing was found")
    return failed


def copy(tree: Path) -> None:
    """Copy what is built and tested to another place, without anything that was built here."""
    generated = {path.with_suffix(".c") for path in Path().glob("*/**/*.pyx")}
    generated.add(Path("reducer/_cyutility.c"))
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)

    def built(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name.endswith(".so")
            or name in {"__pycache__", "results"}
            or Path(folder, name) in generated
        ]

    for name in (*_COPIED, *_COPIED_TOO):
        source = Path(name)
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=built)
        else:
            shutil.copy(source, tree / name)


def build(tree: Path) -> None:
    """Build the extensions of a copy with the sanitizers.

    Raises:
        RuntimeError: one of them cannot be built.
    """
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    switches = {"REDUCTION_BUILD_DEBUG": "1"}
    subprocess.run(command, cwd=tree, env=os.environ | switches, check=True)
    # setup.py goes on without an extension that does not compile: nothing would be tested.
    sources = [
        path for room in ("reducer", "worker_client") for path in (tree / room).rglob("*.pyx")
    ]
    missing = [path.stem for path in sources if not [*path.parent.glob(f"{path.stem}.*.so")]]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} were not built: see what gcc has said")


def environment(tree: Path) -> dict[str, str]:
    """Return what a Python that loads these extensions needs in its environment."""
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        # They must be there before anything allocates, so before Python, which is not built so.
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps objects to the end and libraries their tables: all would be called leaks.
        # What is freed is kept for a while; not so much of it that the process seems to grow.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": str(tree.resolve()),
        "PYTHONMALLOC": "malloc",  # each object is a block that is watched
    }


def run(tree: Path, module: str, *arguments: str) -> int:
    """Run a module under the sanitizers; 0 or 1."""
    print(f"# {module} {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=tree, env=os.environ | environment(tree), check=False)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
