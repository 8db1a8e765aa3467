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
    "_loop": {"engine", "failpoints", "kernels", "runtime", "wire", "zmtp"},
    "_zmtp": {"zmtp"},
}
# ... and what those of the worker's client may take from it.
CLIENT_FLOORS = {
    "_tensor_queue": {"fusion", "staging"},
    "_caller_lead": {"protocol", "runtime", "work"},
}
FRAMEWORKS = {
    *("torch", "lightning", "accelerate", "transformers", "deepspeed"),
    *("tensorflow", "keras", "jax"),
}
HEAVY = FRAMEWORKS | {"zmq", "numpy", "pydantic", "typer", "rich", "structlog"}
COMPILED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.p[yx][xd]"))
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
# What makes code, or objects of any class, of bytes: from a network, it would run what a peer says.
UNSAFE_MODULES = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml"),
}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"),  # pyzmq's
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("unsafe_load", "full_load"),
}

# By the linter's rule; it finds what calls these by any name.
LINTED = {
    "S301": "import pickle\npickle.loads(b'')",
    "S302": "import marshal\nmarshal.loads(b'')",
    "S506": "from yaml import load\nload('')",
    "S307": "eval('1')",
    "S102": "exec('1')",
}


def imported(path):
    """Top-level names of everything that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert node.level == 0, "relative imports hide who is imported"
            names.add(node.module)
    return names


def test_import_contracts():
    done = run_command(Path(sys.executable).with_name("lint-imports"), cwd=ROOT)
    assert done.returncode == 0, done.stdout


def graph_of_imports():
    """Every module of the project, and those that it imports, if only for their types."""
    folders = (*PACKAGES, "bench", "docs", "fuzz", "harness", "hostile", "lab", "tests", "torture")
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    graph = {}
    for module, path in files.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = (f"{node.module}.{alias.name}" for alias in node.names)
                found.update(name if name in files else node.module for name in named)
        graph[module] = found & files.keys() - {module}
    return graph


def test_no_imports_go_in_a_circle():
    TopologicalSorter(graph_of_imports()).prepare()  # raises CycleError, which names the circle


def unsafe(source):
    """What a module uses that may run what it reads."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
            found |= names & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            if (node.module, [alias.name for alias in node.names]) != ("pickle", ["dumps"]):
                found |= {node.module.partition(".")[0]} & UNSAFE_MODULES  # that one reads nothing
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value.partition(".")[0]} & UNSAFE_MODULES  # for import_module
        elif isinstance(node, ast.Call):
            called = node.func
            found |= {getattr(called, "id", "")} & UNSAFE_NAMES
            found |= {getattr(called, "attr", "")} & UNSAFE_METHODS
            for keyword in node.keywords:
                allowed = getattr(keyword.value, "value", True)
                if (keyword.arg, bool(allowed)) in {
                    ("allow_pickle", True),
                    ("weights_only", False),
                }:
                    found.add(keyword.arg)
    return found


def test_no_code_is_read_from_data():
    found = {path: unsafe(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        *LINTED.values(),
        "from importlib import import_module\nimport_module('pickle')",
        "from pickle import dumps, loads",
        "def f(socket): return socket.recv_pyobj()",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch.distributed import broadcast_object_list as b\ndist.broadcast_object_list([])",
    ],
)
def test_such_code_is_found(source):
    assert unsafe(source)


def test_the_linter_finds_such_code_too():
    ruff = Path(sys.executable).with_name("ruff")
    check = ("check", "--output-format", "concise", "--stdin-filename", "reducer/x.py", "-")
    done = run_command(ruff, *check, cwd=ROOT, input="\n".join(LINTED.values()))
    assert not [rule for rule in LINTED if f" {rule} " not in done.stdout]


def reads_the_environment(path):
    # Handing all of it on to a child process is the launcher's business.
    text = path.read_text().replace("os.environ.items()", "")
    return bool(re.search(r"\benviron\b|\bgetenv|\benvironb\b", text))


def test_the_environment_is_read_in_the_config_modules_alone():
    assert {path.name for path in SOURCES if reads_the_environment(path)} == {"config.py"}


def test_the_protocol_needs_the_standard_library_alone():
    home = ROOT / "reducer"
    files = [home / f"{name}.py" for name in ("errors", "failpoints/__init__", "keyfiles", "units")]
    for path in [*files, *sorted((home / "wire").rglob("*.py")), *(home / "zmtp").glob("*.py")]:
        for module in imported(path):
            top, _, rest = module.partition(".")
            assert top in sys.stdlib_module_names or (
                top == "reducer" and rest.partition(".")[0] in {"wire", "errors", "units", ""}
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


def test_using_a_client_needs_no_framework():
    code = (
        "import numpy; from reducer import local_pool; from worker_client import init\n"
        "with local_pool(1) as servers, init(servers=servers, rank=0, world_size=1) as client:\n"
        "    client.all_reduce(numpy.ones(3)).wait()\n"
    )
    assert not loaded_by(code) & FRAMEWORKS
