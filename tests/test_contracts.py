"""The house rules that a machine can check: who may import what, who reads the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("reducer", "worker_client")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_import_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_is_read_from_data(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported(path)}
    assert not tops & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_environment_is_read_in_the_config_modules_alone(path: Path) -> None:
    # Handing the environment on to a child process (`**os.environ`) is the launcher's business.
    if path.name != "config.py" and "demo" not in path.parts:
        text = path.read_text()
        assert "os.environ" not in text
        assert "getenv" not in text


@pytest.mark.parametrize("name", ["wire", "errors"])
def test_the_protocol_needs_the_standard_library_alone(name: str) -> None:
    home = ROOT / "reducer" / name
    files = sorted(home.rglob("*.py")) or [home.with_suffix(".py")]
    for path in files:
        for module in imported(path):
            top, _, rest = module.partition(".")
            assert top in sys.stdlib_module_names or (
                top == "reducer" and rest.partition(".")[0] in {"wire", "errors", ""}
            ), f"{path.name} imports {module}"


def test_compiled_modules_keep_to_their_floor() -> None:
    for path in [*ROOT.glob("reducer/**/*.pyx"), *ROOT.glob("reducer/**/*.pxd")]:
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["from"], ["cimport"], ["import"]) and words[1].startswith("reducer"):
                assert words[1].startswith(("reducer.kernels", "reducer.wire", "reducer.errors"))


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, worker_client; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert not tops & {"torch", "zmq", "numpy", "pydantic", "typer", "rich"}
