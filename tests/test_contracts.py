"""The house rules that a machine can check: who may import what, who reads the environment."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parent.parent
PACKAGES = ("reducer", "worker_client")
# What each compiled module may take from the reducer, besides declarations of plain C; those that
# are not named, the protocol alone.
FLOORS = {
    "_kernels": {"kernels", "wire", "errors"},
    "_slots": {"engine", "wire"},
    "_flight": {"errors", "wire", "zmtp"},
    "_loop": {"clock", "engine", "errors", "kernels", "runtime", "wire", "zmtp"},
    "_keys": {"keyfiles", "zmtp"},
}
# ... and what those of the worker's client may take from it.
CLIENT_FLOORS = {
    "_tensor_queue": {"fusion", "protocol", "staging"},
    "_loop": {"protocol", "runtime", "work"},
}
FRAMEWORKS = {"torch", "lightning", "accelerate", "transformers", "deepspeed"}
FRAMEWORKS |= {"tensorflow", "keras", "jax", "mlx"}
HEAVY = FRAMEWORKS | {"zmq", "numpy", "pydantic", "typer", "rich", "structlog"}
COMPILED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.p[yx][xd]"))
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# What makes code, or objects of any class, of bytes: from a network, it would run what a peer says.
UNSAFE = re.compile(
    r"""^\s*(?:from|import)\ (?:marshal|shelve|dill|cloudpickle|joblib|jsonpickle|yaml)\b
      | ^\s*import\ pickle\b | ^\s*from\ pickle\ import\ (?!dumps$)
      | ["'](?:pickle|marshal|shelve|dill|cloudpickle|joblib|jsonpickle|yaml)["'.]
      | (?<![\w.])(?:eval|exec|compile|__import__)\(
      | \.(?:recv_pyobj|send_pyobj|recv_serialized|send_serialized)\(
      | \.(?:all_gather_object|broadcast_object_list|gather_object|scatter_object_list)\(
      | \.(?:unsafe_load|full_load)\( | allow_pickle=(?!False) | weights_only=(?!True)""",
    re.MULTILINE | re.VERBOSE,
)


def imported(path):
    """Every module that a module imports, wherever in it, and the name that it takes of that."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who is imported"
            yield from ((node.module, alias.name) for alias in node.names)


def test_no_imports_go_in_a_circle():
    folders = (*PACKAGES, "bench", "docs", "fuzz", "harness", "hostile", "lab", "tests", "torture")
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    graph = {}
    for importer, path in files.items():
        named = ((module, f"{module}.{name}") for module, name in imported(path))
        found = {name if name in files else module for module, name in named}
        graph[importer] = found & files.keys() - {importer}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_code_is_read_from_data():
    found = {path: UNSAFE.findall(path.read_text()) for path in SOURCES}
    assert {path: said for path, said in found.items() if said} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import marshal",
        "from yaml import load",
        "eval('1')",
        "exec('1')",
        "from importlib import import_module\nimport_module('pickle')",
        "from pickle import dumps, loads",
        "def f(socket): return socket.recv_pyobj()",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch.distributed import broadcast_object_list as b\ndist.broadcast_object_list([])",
    ],
)
def test_such_code_is_found(source):
    assert UNSAFE.search(source)


def test_the_environment_is_read_in_the_config_modules_alone():
    # Handing all of it on to a child process is the launcher's business.
    texts = ((path.name, path.read_text().replace("os.environ.items()", "")) for path in SOURCES)
    read = re.compile(r"\benviron\b|\bgetenv|\benvironb\b")
    assert {name for name, text in texts if read.search(text)} == {"config.py"}


def test_the_protocol_needs_the_standard_library_alone():
    home = ROOT / "reducer"
    files = [home / f"{name}.py" for name in ("errors", "keyfiles", "units")]
    for path in [*files, *sorted((home / "wire").rglob("*.py")), *(home / "zmtp").glob("*.py")]:
        for module, _ in imported(path):
            top, _, rest = module.partition(".")
            assert top in sys.stdlib_module_names or (
                top == "reducer"
                and rest.partition(".")[0] in {"wire", "errors", "units", "zmtp", ""}
            ), f"{path.name} imports {module}"


def test_compiled_modules_keep_to_their_floor():
    assert COMPILED
    for path in COMPILED:
        text = path.read_text()
        for module in re.findall(r"^\s*(?:from|import|cimport)\s+([\w.]+)", text, flags=re.M):
            at = f"{path.name} imports {module}"
            assert not module.startswith("."), f"{at}: relative imports hide who is imported"
            top, _, rest = module.partition(".")
            assert top not in {"zmq", "torch", "os", "pickle", "marshal"}, at
            room = rest.partition(".")[0]
            assert top != "worker_client" or room in CLIENT_FLOORS.get(path.stem, {"protocol"}), at
            floors = FLOORS.get(path.stem, {"wire", "errors"})
            assert top != "reducer" or room in floors, at
        assert "getenv" not in text, path


def loaded_by(code):
    """Return the packages that an interpreter has loaded after this code."""
    done = run_command(sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_the_client_loads_nothing_heavy():
    assert not loaded_by("import worker_client") & HEAVY


def test_a_reducer_and_keygen_load_no_libzmq():
    assert "zmq" not in loaded_by("import reducer.cli, reducer.commands.keygen, reducer.server")


def test_using_a_client_needs_no_framework():
    code = (
        "import numpy; from reducer import local_pool; from worker_client import init\n"
        "with local_pool(1) as servers, init(servers=servers, rank=0, world_size=1) as client:\n"
        "    client.all_reduce(numpy.ones(3)).wait()\n"
    )
    assert not loaded_by(code) & FRAMEWORKS
