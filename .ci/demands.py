"""What a change demands besides `make lint` and `make test`: a target and its variables a line.

Reads changed paths, a line each, and prints the targets of every row of `DEMANDS` that one of them
matches::

    git diff --name-only BASE | python3 .ci/demands.py

With ``--full`` it prints all targets, and reads nothing.
"""

from __future__ import annotations

import shlex
import sys
from fnmatch import fnmatch

FRAMEWORKS, CONTAINERS, CLOUDS = "test-frameworks", "test-containers", "test-clouds"
TORCH_SUITE, EXTENDED = "test-torch-suite", "test-extended"
EVERYTHING = (EXTENDED, CONTAINERS, CLOUDS, FRAMEWORKS, TORCH_SUITE)
ADAPTERS = "accelerate collectives ddp fsdp jax keras lightning packing tensorflow torch_*"

# Patterns of paths (a * also matches slashes), and what they demand: targets, or folders and files
# whose extended tests are run.
DEMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (".ci/* Makefile pyproject.toml setup.py constraints.txt tests/conftest.py", EVERYTHING),
    ("tests/extended.py tests/ranks.py tests/fork_server.py", EVERYTHING),
    ("reducer/kernels/*", ("tests/kernels", "tests/integration/test_bits.py")),
    ("reducer/* worker_client/*", ("tests/engine", "tests/sim", "tests/worker_client")),
    ("reducer/keyfiles.py reducer/key* reducer/auth*", ("tests/security",)),
    (f"worker_client/{ADAPTERS.replace(' ', '.py worker_client/')}.py", (FRAMEWORKS,)),
    ("worker_client/horovod/*", (FRAMEWORKS,)),
    ("examples/* tests/frameworks/*", (FRAMEWORKS,)),
    ("tests/frameworks/torch_suite.py worker_client/torch_*", (TORCH_SUITE,)),
    ("docker/* tests/containers/* .dockerignore MANIFEST.in", (CONTAINERS,)),
    ("docker/vertex/* docker/azureml/* tests/containers/test_manifests.py", (CLOUDS,)),
    ("worker_client/launch/* worker_client/launching.py", ("tests/launch",)),
    ("lab/*", ("tests/lab",)),
    ("fuzz/*", ("tests/fuzz",)),
)


def demanded(paths: list[str]) -> list[str]:
    """Return the lines for changed paths."""
    found = {demand for path in paths for demand in _by(path)}
    folders = sorted(demand for demand in found if demand.startswith("tests/"))
    lines = [target for target in EVERYTHING if target in found and target != EXTENDED]
    if EXTENDED in found or folders:  # of all tests, unless folders alone are demanded
        lines.insert(0, _extended([] if EXTENDED in found else folders))
    return lines


def _by(path: str) -> set[str]:
    found = {
        demand
        for patterns, demands in DEMANDS
        if any(fnmatch(path, pattern) for pattern in patterns.split())
        for demand in demands
    }
    top, _, rest = path.partition("/")
    folder = rest.partition("/")[0]
    if top == "tests" and folder not in {"frameworks", "containers"} and "/" in rest:
        found.add(f"tests/{folder}")  # a folder of tests is its own
    return found


def _extended(folders: list[str]) -> str:
    """Return the line that runs the extended tests that `make test` left out."""
    return f"{EXTENDED} SELECT={shlex.quote(' '.join(['-m extended', *folders]))}"


if __name__ == "__main__":
    lines = sys.stdin.read().split() if "--full" not in sys.argv else ["Makefile"]
    for line in demanded(lines):
        print(line)
