"""House rules of names and sizes: what a class name means, and how large a part may be.

`names.toml` has the exceptions, each with its reason.
"""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("reducer", "worker_client")
EXCEPTIONS = tomllib.loads((ROOT / "tests" / "names.toml").read_text())
SOURCES, COMPILED = (
    {
        str(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob(f"*{suffix}"))
    }
    for suffix in (".py", ".pyx")
)
TREES = {path: ast.parse(text) for path, text in SOURCES.items()}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Names with an underscore that are Python's own, for everybody's use.
PUBLIC = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}


def named(tree, within=""):
    """Classes and functions of a module, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, *FUNCTION)):
            yield within + node.name, node
            yield from named(node, f"{within}{node.name}.")
        else:
            yield from named(node, within)


def definitions(kind):
    """Classes or functions of both packages, as "module: name"."""
    for path, tree in TREES.items():
        for name, node in named(tree):
            if isinstance(node, kind):
                yield f"{path}: {name}", node


def attributes(node):
    """Names of what an object of a class has: fields, and what its methods set of it."""
    found, methods = set(), [one for one in node.body if isinstance(one, FUNCTION)]
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
            found.add(one.target.id)
    for method in methods:
        for one in ast.walk(method):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                found |= {one.attr} if ast.unparse(one.value) == "self" else set()
    return found - {method.name for method in methods}  # properties


def lines(node):
    """How many lines a function has without its docstring."""
    text = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    return node.end_lineno - node.lineno + 1 - (text.end_lineno - text.lineno + 1 if text else 0)


def arguments(node):
    """How many arguments a function takes, without self and cls."""
    taken = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(taken) - (taken[:1] in (["self"], ["cls"]))


def reached(node, own=frozenset()):
    """Yield the private attributes that code uses of what is no object of the class around it."""
    if isinstance(node, ast.ClassDef):
        own = attributes(node) | {one.name for one in ast.walk(node) if isinstance(one, FUNCTION)}
        own |= {
            ast.unparse(to)
            for one in node.body
            if isinstance(one, ast.Assign)
            for to in one.targets
        }
    elif isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
        of = ast.unparse(node.value)
        if of not in {"self", "cls", "super()"} and node.attr not in own:
            yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from reached(child, own)


def test_a_class_name_means_one_thing():
    places = defaultdict(set)
    for path, text in (SOURCES | COMPILED).items():
        for name in re.findall(r"^(?:cdef )?class _?(\w+)", text, re.MULTILINE):
            places[name].add(path)
    several = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    alike = EXCEPTIONS["alike"]
    assert {name: paths for name, paths in several.items() if name not in alike} == {}
    assert alike.keys() - several.keys() == set(), "these have one place now"


@pytest.mark.parametrize(
    ("name", "kind", "measure", "most"),
    [
        ("attributes", ast.ClassDef, lambda node: len(attributes(node)), 20),
        ("lines", FUNCTION, lines, 60),
        ("arguments", FUNCTION, arguments, 8),
    ],
    ids=["attributes", "lines", "arguments"],
)
def test_classes_and_functions_are_small(name, kind, measure, most):
    allowed = EXCEPTIONS[name]
    found = {one: size for one, node in definitions(kind) if (size := measure(node)) > most}
    assert {one: size for one, size in found.items() if one not in allowed} == {}
    assert allowed.keys() - found.keys() == set(), f"these have no more than {most} now"


def test_private_attributes_stay_in_their_class():
    found = {path: set(reached(tree)) for path, tree in TREES.items()}
    for path, text in COMPILED.items():
        code = re.sub(r'"""(?s:.*?)"""|#.*|^ *(?:from|cimport|import) .*', "", text, flags=re.M)
        found[path] = set(re.findall(r"(?<!\bself)(?<!\bcls)(?<=\w)\.(_[a-z]\w*)", code))
    used = {path: names for path, all_of in found.items() if (names := all_of - PUBLIC)}
    assert used == {path: set(names) for path, (_, *names) in EXCEPTIONS["private"].items()}
