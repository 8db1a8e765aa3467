"""Each room keeps to its budget of lines, which tests/weight.toml has."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "tests/weight.toml").read_text())
COUNTED = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h"}


def lines_by_room():
    lines = Counter()
    for top in {room.partition("/")[0] for room in BUDGETS}:
        for path in (ROOT / top).rglob("*.*"):
            of_cython = path.suffix == ".c" and path.name.startswith("_")  # which git does not have
            if path.suffix in COUNTED and not of_cython:
                folders = map(str, path.relative_to(ROOT).parents)  # the innermost room counts
                room = next(folder for folder in folders if folder in BUDGETS)
                lines[room] += path.read_bytes().count(b"\n")
    return lines


LINES = lines_by_room()


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room):
    assert LINES[room] > 0, f"{room} is empty: take it out of tests/weight.toml"
    assert LINES[room] <= BUDGETS[room], (
        f"{room} has {LINES[room]} lines and a budget of {BUDGETS[room]}: take something out, or "
        "raise the figure in tests/weight.toml and say why in the commit's message"
    )


def test_every_room_has_a_budget():
    rooms = {
        str(path.parent.relative_to(ROOT))
        for package in ("reducer", "worker_client")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    assert rooms <= set(BUDGETS), "a new room needs a budget in tests/weight.toml"
