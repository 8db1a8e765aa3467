"""What a change demands besides `make lint` and `make test`.

Reads changed paths, a line each, and prints the lines of make that `.ci/run` runs: of everything
that a row of `DEMANDS` asks for, what `REPRESENTATIVES` says stands for it, and in lines that begin
with "left out:" what is not run::

    git diff --name-only BASE | python3 .ci/demands.py

With ``--full`` it reads nothing and prints all that there is, whole. Otherwise everything, `make
lint` and `make test` included, takes at most `BUDGET_S` on two cores; tests/test_ci.py adds it up.
"""

from __future__ import annotations

import re
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FRAMEWORKS, CONTAINERS, CLOUDS = "test-frameworks", "test-containers", "test-clouds"
TORCH_SUITE, EXTENDED, DOCS, WHEELS = "test-torch-suite", "test-extended", "docs", "wheels"
SANITIZE, THREADS, FUZZ = "sanitize", "sanitize-threads", "fuzz"
JOBS = "tests/integration/test_"


class Representative(NamedTuple):
    """What `.ci/run` runs in place of a target.

    Attributes:
        line: of make; "" if a part of `make test` stands for the target.
        seconds: that it takes on two cores in a fresh clone, with what it installs.
        stands: what of the target is run, and where; the rest is left out.
    """

    line: str
    seconds: int
    stands: str


BUDGET_S = 1500
BASE_S = 470  # the environment, `make lint` and `make test`, in a fresh clone
REPRESENTATIVES = {
    EXTENDED: Representative(
        "test-extended SELECT='-m extended tests/torture/test_guarantee.py -k error_in_time'",
        25,
        "jobs under random faults, and the fast tests that stand for extended ones, in make test",
    ),
    FRAMEWORKS: Representative(
        "test-frameworks SELECT='tests/frameworks/test_accelerate.py "
        "tests/frameworks/test_examples.py::test_it_trains_as_without_reducers[accelerate] "
        "tests/frameworks/test_examples.py::test_it_trains_as_without_reducers[transformers]'",
        205,
        "Accelerate and transformers",
    ),
    TORCH_SUITE: Representative(
        "", 0, "tests/integration/test_gloo_checks.py and test_torch_backend.py, in make test"
    ),
    CONTAINERS: Representative(
        "test-containers SELECT='tests/containers/test_manifests.py "
        "tests/containers/test_images.py::test_a_reducer_serves_with_no_rights_at_all'",
        305,
        "the reducer's image, run, and the judges of manifests",
    ),
    CLOUDS: Representative("", 0, "the judges of test-containers"),
    DOCS: Representative("docs", 50, "all of it"),
    WHEELS: Representative(
        "wheels SELECT=tests/wheels/test_wheels.py", 205, "this machine's wheel"
    ),
    SANITIZE: Representative("sanitize SANITIZE=--short", 155, "loops, codec and slots"),
    THREADS: Representative("", 0, "nothing; it is run before an issue is resolved"),
    FUZZ: Representative("fuzz FUZZ_SECONDS=5", 50, "30 s of all targets together"),
}
EVERYTHING = tuple(REPRESENTATIVES)


def _modules(names: str) -> str:
    """Return patterns of a worker's modules, in whatever room, compiled twins and all."""
    return " ".join(f"worker_client/*{name}.*" for name in names.split())


# Patterns of paths (a * also matches slashes), and what they demand: targets, or what the names
# of files begin with whose extended tests are run.
DEMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        ".ci/run .ci/*.py Makefile pyproject.toml setup.py constraints.txt tests/conftest.py",
        EVERYTHING,
    ),
    ("tests/ranks.py tests/fork_server.py harness/*", EVERYTHING),
    ("reducer/* worker_client/*", ("tests/engine", "tests/sim", "tests/worker_client")),
    ("*.c *.h *.pyx *.pxd", (SANITIZE, THREADS, FUZZ)),
    ("fuzz/* tests/fuzz/*", (FUZZ,)),
    ("fuzz/sanitizers.py", (SANITIZE, THREADS)),
    # -- reducers
    ("reducer/kernels/*", ("tests/kernels", f"{JOBS}bits.py")),
    ("reducer/monitoring/* reducer/commands/status.py", ("tests/reducer",)),
    ("reducer/engine/lateness*", ("tests/lab/test_stragglers.py",)),
    (
        "reducer/engine/* reducer/runtime/* worker_client/runtime/*",
        ("tests/faults", f"{JOBS}faults.py"),
    ),
    ("torture/failpoints/*", ("tests/faults",)),
    # -- workers
    (_modules("failover shard_map"), (f"{JOBS}faults.py", f"{JOBS}failures.py")),
    (_modules("fallback process_group"), (f"{JOBS}faults.py",)),
    (
        _modules("elastic communicator membership* replay_log reconcile newcomers"),
        ("tests/memberships", f"{JOBS}faults.py", f"{JOBS}join.py", "tests/lab/test_elastic.py"),
    ),
    ("worker_client/outer/*", ("tests/quorum", f"{JOBS}quorum.py", FRAMEWORKS)),
    (_modules("lifecycle operation"), (f"{JOBS}rank_loss.py", f"{JOBS}faults.py")),
    (
        _modules("node node_* placement"),
        (f"{JOBS}nodes", "tests/lab/test_nodes.py"),
    ),
    (_modules("wire_rule casting weighted cast*"), (f"{JOBS}wire_dtype.py",)),
    ("worker_client/staging/cast*", ("tests/kernels",)),
    ("worker_client/staging/*", (f"{JOBS}wire_ddp.py",)),
    (_modules("hosting"), (f"{JOBS}faults.py",)),
    ("worker_client/commands/demo/*", (f"{JOBS}demo.py",)),
    (
        _modules(
            "accelerate collectives ddp fsdp jax keras lightning local_sgd mlx packing "
            "tensorflow torchft"
        ),
        (FRAMEWORKS,),
    ),
    ("worker_client/nccl/*", ("tests/nccl",)),
    ("worker_client/torch_backend/*", (FRAMEWORKS,)),
    ("worker_client/horovod/*", (FRAMEWORKS, f"{JOBS}horovod.py")),
    (
        f"worker_client/torch_backend/* {_modules('rendezvous')}",
        (TORCH_SUITE, f"{JOBS}torch_backend.py"),
    ),
    (_modules("ddp rendezvous"), (f"{JOBS}ddp.py", f"{JOBS}readme.py")),
    (
        "worker_client/launch/* worker_client/commands/launch.py worker_client/commands/doctor/*",
        ("tests/launch",),
    ),
    ("worker_client/commands/join/*", ("tests/launch",)),
    (
        f"{_modules('leaves')} reducer/wire/leaves.* examples/leaves_gpt.py",
        ("tests/memberships", f"{JOBS}leaves.py", FRAMEWORKS),
    ),
    # -- what is beside them
    ("examples/* tests/frameworks/* tests/horovod_imports.py", (FRAMEWORKS,)),
    ("examples/*.ipynb", (f"{JOBS}notebook.py",)),
    ("examples/elastic_digits.py", ("tests/lab/test_elastic.py",)),
    ("examples/quickstart.py", (f"{JOBS}readme.py", f"{JOBS}pages.py", "tests/launch")),
    ("docs/*", (DOCS, f"{JOBS}pages.py", "tests/lab/test_tutorial.py")),
    ("CONTRIBUTING.md SECURITY.md CHANGELOG.md */README.md tests/site/*", (DOCS,)),
    ("reducer/errors.py reducer/pool.py", (DOCS,)),
    (
        _modules(
            "accelerate client collectives ddp elastic fsdp jax keras lightning local_sgd mlx "
            "tensorflow torchft work"
        ),
        (DOCS,),
    ),
    ("worker_client/__init__.py worker_client/outer/*", (DOCS,)),
    ("worker_client/horovod/* worker_client/torch_backend/*", (DOCS,)),
    ("tests/frameworks/torch_suite.py", (TORCH_SUITE,)),
    (
        "docker/* tests/containers/* .dockerignore MANIFEST.in build.lock runtime.lock",
        (CONTAINERS,),
    ),
    (
        "docker/vertex/* docker/azureml/* tests/containers/test_manifests.py constraints-cl*",
        (CLOUDS,),
    ),
    ("docker/vertex/*", ("tests/launch/test_vertex.py",)),
    ("docker/grafana/* docker/prometheus/*", ("tests/reducer/test_prometheus.py",)),
    ("build.lock MANIFEST.in reducer/monitoring/page/*", (f"{JOBS}wheel.py",)),
    ("build.lock release.lock tests/wheels/* *.pyx *.pxd", (WHEELS,)),
    ("lab/*", ("tests/lab", "tests/launch/test_vertex.py")),
    ("bench/*", ("tests/bench",)),
    ("torture/*", ("tests/torture",)),
    ("bench/sites.py examples/*gpt*.py", ("tests/lab/test_sites.py",)),
    ("examples/gpt_text.py", ("tests/lab/test_tutorial.py",)),
    ("torture/chaos* torture/fault* torture/rank_loss.py", (f"{JOBS}rank_loss.py", "tests/lab")),
)


def demanded(paths: list[str]) -> list[str]:
    """Return the lines of make for changed paths, and what they leave out."""
    found = {demand for path in paths for demand in _by(path)}
    files = {file for demand in found if demand.startswith("tests/") for file in files_of(demand)}
    whole = {target: target for target in REPRESENTATIVES if target in found}
    if files or EXTENDED in found:  # all of them, unless some alone are demanded
        chosen = [] if EXTENDED in found else sorted(files)
        whole[EXTENDED] = f"{EXTENDED} SELECT={shlex.quote(' '.join(['-m extended', *chosen]))}"
    rows = [REPRESENTATIVES[target] for target in whole]
    return [
        *(row.line for row in rows if row.line),
        *(
            f"left out: make {line} (in its place: {row.stands})"
            for line, row in zip(whole.values(), rows, strict=True)
            if line != row.line
        ),
    ]


def _by(path: str) -> set[str]:
    found = {
        demand
        for patterns, demands in DEMANDS
        if any(fnmatch(path, pattern) for pattern in patterns.split())
        for demand in demands
    }
    top, _, rest = path.partition("/")
    if top == "tests" and "/" in rest:
        found.add(f"tests/{rest.partition('/')[0]}")  # a folder of tests is its own
    return found


def files_of(demand: str) -> set[str]:
    """Return the folder, or the files whose names begin so, if extended tests are there."""
    all_files = {
        file.relative_to(ROOT).as_posix(): file for file in ROOT.glob("tests/**/test_*.py")
    }
    files = {name for name in all_files if name.startswith(demand)}
    if not any(_has_extended(all_files[name]) for name in files):
        return set()
    return {demand} if (ROOT / demand).is_dir() else files


def _has_extended(file: Path) -> bool:
    """Whether a file has a mark, or the fixture of tests/conftest.py, one of whose cases has it."""
    text, conftest = file.read_text(encoding="utf-8"), file.with_name("conftest.py")
    own = conftest.exists() and "def impl(" in conftest.read_text(encoding="utf-8")
    return "mark.extended" in text or (not own and re.search(r"\bimpl\b", text) is not None)


if __name__ == "__main__":
    whole = (f"{EXTENDED} SELECT='-m extended'", *EVERYTHING[1:])
    for line in whole if "--full" in sys.argv else demanded(sys.stdin.read().split()):
        print(line)
