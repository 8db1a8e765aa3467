"""Debug builds apart: copies of the tree whose extensions carry sanitizers.

``python -m fuzz.sanitizers`` builds one with those of addresses and undefined behaviour, runs the
tests of what is compiled there, and feeds it the corpus and changed inputs. With ``--threads`` it
builds one with the thread sanitizer, and runs the tests in which several threads share what is
compiled. The tree's own extensions stay as they are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fuzz.targets import TARGETS

TREE = Path("build/sanitized")
THREADS_TREE = Path("build/sanitized-threads")
# What goes through compiled code: kernels, slots, loops, flights, casts, ZMTP and NCCL's plug-in.
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
    "tests/nccl",
    "tests/fuzz",
)
# Of these, the ones that reach the most of it in a minute.
SHORT_TESTS = (
    "tests/engine/test_engine.py",
    "tests/engine/test_intruders.py",
    "tests/worker_client/test_flight.py",
    "tests/transport/test_hang_up.py",
    "tests/transport/test_lifetimes.py",
    "tests/transport/test_pairs.py",
    "tests/transport/test_resume.py",
    "tests/zmtp/test_codec.py",
    "tests/nccl/test_point_to_point.py",
)
# What several threads of one process use: heartbeats beside the loops, pairs between a reducer's
# threads and a worker's, a client's callers beside its own thread, and NCCL's.
THREADED_TESTS = (
    "tests/transport",
    "tests/worker_client/test_driver.py",
    "tests/worker_client/test_caller_lead.py",
    "tests/worker_client/test_core.py",
    "tests/nccl/test_collective.py",
    "tests/nccl/test_point_to_point.py",
)
_COPIED = (
    *("reducer", "worker_client", "fuzz", "tests", "torture"),
    *("harness", "hostile", "bench", "lab"),
)
_COPIED_TOO = ("setup.py", "pyproject.toml", "README.md", "LICENSE")  # setup.py reads the others


def main() -> int:
    """Build, test and fuzz; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="fuzz.sanitizers", description=__doc__)
    parser.add_argument("inputs", type=int, nargs="?", default=2000, help="for every fuzz target")
    parser.add_argument("--short", action="store_true", help="fewer tests, a tenth of the inputs")
    parser.add_argument("--threads", action="store_true", help="look for data races instead")
    given = parser.parse_args()
    tree = THREADS_TREE if given.threads else TREE
    copy(tree)
    build(tree, threads=given.threads)
    tests = ("-q", "-o", "timeout=600")
    if given.threads:
        failed = run(tree, "pytest", *tests, *THREADED_TESTS, threads=True)
        for report in sorted(tree.glob("report.*")):  # of each process
            print(report.read_text(encoding="utf-8"))
            failed = 1
    else:
        failed = run(tree, "pytest", *tests, *(SHORT_TESTS if given.short else TESTS))
        inputs = given.inputs // 10 if given.short else given.inputs
        for name in TARGETS:
            failed |= run(tree, "fuzz", name, "--blind", "--runs", str(inputs))
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


def build(tree: Path, *, threads: bool = False) -> None:
    """Build the extensions of a copy with the sanitizers, or with that of threads."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    switches = {"REDUCTION_BUILD_DEBUG": "threads" if threads else "1"}
    subprocess.run(command, cwd=tree, env=os.environ | switches, check=True)


def environment(tree: Path, *, threads: bool = False) -> dict[str, str]:
    """Return what a Python that loads these extensions needs in its environment."""
    names = ("libtsan.so",) if threads else ("libasan.so", "libubsan.so")
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    switches = {
        # They must be there before anything allocates, so before Python, which is not built so.
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(tree.resolve()),
    }
    if threads:
        # Neither Python nor what it loads besides is watched but for their locks, by which the
        # sanitizer knows what the GIL keeps apart. Reports are files: pytest takes what is printed.
        return switches | {
            "TSAN_OPTIONS": f"log_path={tree.resolve() / 'report'}:exitcode=99"
            ":ignore_noninstrumented_modules=1:die_after_fork=0"
        }
    return switches | {
        # Python keeps objects to the end and libraries their tables: all would be called leaks.
        # What is freed is kept for a while; not so much of it that the process seems to grow.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # each object is a block that is watched
    }


def run(tree: Path, module: str, *arguments: str, threads: bool = False) -> int:
    """Run a module under the sanitizers; 0 or 1."""
    print(f"# {module} {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", module, *arguments]
    switches = environment(tree, threads=threads)
    done = subprocess.run(command, cwd=tree, env=os.environ | switches, check=False)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
