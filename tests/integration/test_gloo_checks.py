"""A script sees over the backend what it sees over Gloo, or docs/frameworks.md says why not."""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import local_pool
from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")

ROOT = Path(__file__).parents[2]
RANK = ("-m", "tests.integration.gloo_checks")
# By how much sums in another order may differ, relative to the largest. Gloo rounds 16-bit types
# after each addition, reducers once.
ROUNDED = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SIZES |= {"int64": 8, "int32": 4, "int8": 1, "uint8": 1}
BY_REDUCERS = ("SUM", "MIN", "MAX", "PRODUCT")
WEIGHTS = 4 * (8 * 33 + 33 + 33 + 33 + 33 * 3 + 3)  # bytes of the network that is trained
# How many bytes reducers reduce in some checks: in all, and for each rank that there is.
BYTES = {
    **{
        f"all_reduce, {dtype}, {op}": 15 * size
        for dtype, size in SIZES.items()
        for op in BY_REDUCERS
    },
    "all_reduce_coalesced, float32, SUM": (3 + 4) * 4,
    "all_reduce_coalesced, bfloat16, MAX": (3 + 4) * 2,
    "together all reduce": (3 + 4) * 4,
    "DDP, by default, rounded": 4 * WEIGHTS,  # in four steps
    "compiled, rounded": 4 * WEIGHTS,
    "DDP, FP16_COMPRESS, rounded to 16 bits": 4 * WEIGHTS // 2,
}
PARTS = {
    **{f"reduce_scatter{call}, float32, SUM": 4 * 4 for call in ("", "_tensor")},
    **{f"reduce_scatter{call}, bfloat16, MAX": 4 * 2 for call in ("", "_tensor")},
    **{f"reduce_scatter{call}, int64, SUM": 4 * 8 for call in ("", "_tensor")},
    "together reduce scatter": (2 + 3) * 4,
}
# How the names of checks begin in which reducers have something to do, however much it is.
BY_REDUCERS_AS_WELL = ("sharded", "with zero", "joined", "DDP, Power")
# How the names of checks begin in which reducers have nothing to do.
BY_GLOO = (
    *(f"all_reduce, {dtype}, {op}" for dtype in SIZES for op in ("BAND", "BOR", "BXOR")),
    *("all_reduce, bool, ", "all_reduce, sparse", "reduce, ", "broadcast, ", "all_gather, "),
    *("all_to_all_single, ", "exchanged", "gathered", "scatter", "objects", "received", "sent"),
    *("barriers", "monitored", "tensor of shards", "tensors that gloo frees", "group of one"),
)
# Of which ranks have the same bits, though not those of Gloo.
SAME_EVERYWHERE = ("DDP, ", "joined")


class Difference(NamedTuple):
    """What a script does in some checks, what becomes of it over either backend, and why."""

    checks: tuple[str, ...]
    what: str
    gloo: str
    ours: str
    why: str


DIFFERENCES = (
    Difference(
        ("all_reduce, every other column", "all_reduce, one column"),
        "`all_reduce` of a tensor with gaps, such as `t[:, 1]`",
        "wrong, without an error",
        "right",
        "Gloo takes the memory from the first element on for the tensor",
    ),
    Difference(
        ("all_reduce, expanded",),
        "`all_reduce` of an expanded tensor",
        "wrong, without an error",
        "`ConfigError`",
        "elements that share memory have no sum of their own each",
    ),
    Difference(
        ("group that was destroyed",),
        "`all_reduce` in a group that was destroyed",
        "is done",
        "an error",
        "a destroyed group has left its job",
    ),
    Difference(
        ("a call after all these errors",),
        "`all_reduce` after another collective has timed out",
        "an error",
        "is done",
        "Gloo closes its connections then, and reducers have their own",
    ),
)


def table():
    """Return what differs and why, in Markdown."""
    rows = "".join(f"| {one.what} | {one.gloo} | {one.ours} | {one.why} |\n" for one in DIFFERENCES)
    return "| what | over Gloo | over the backend | because |\n|---|---|---|---|\n" + rows


def found(backend, world_size, servers, names):
    """Return what each rank sees over a backend in the checks whose names begin so."""
    return run(environments(world_size, servers), *RANK, backend, ";".join(names), timeout_s=280)


def alike(name, gloo, ours):
    """Whether a script sees the same; errors are the same if what catches Gloo's catches ours."""
    if isinstance(gloo, dict) and isinstance(ours, dict):
        if "raised" in gloo and "raised" in ours:
            return gloo["raised"][0] in ours["raised"]
        if "elements" in gloo and "elements" in ours and "rounded" in name:
            dtype = "float16" if name.endswith("16 bits") else gloo["dtype"]
            same = all(gloo[of] == ours[of] for of in ("dtype", "shape"))
            return same and close(gloo["elements"], ours["elements"], ROUNDED[dtype])
    if isinstance(gloo, list) and isinstance(ours, list):
        return len(gloo) == len(ours) and all(map(partial(alike, name), gloo, ours))
    return bool(gloo == ours)


def close(gloo, ours, relative):
    pairs = [(float(one), float(other)) for one, other in zip(gloo, ours, strict=True)]
    largest = max((abs(one) for one, _ in pairs), default=0.0)
    return all(math.isclose(*pair, rel_tol=0.0, abs_tol=relative * largest) for pair in pairs)


def check(world_size, backend="reduction", servers=(), names=()):
    """Check that a backend differs from Gloo as `DIFFERENCES` says, and reduces what it should.

    Without servers ranks host them; without names all checks are made. Returns their names.
    """
    gloo = found("gloo", world_size, (), names)
    ours = found(backend, world_size, servers, names)
    assert [list(rank) for rank in gloo] == [list(rank) for rank in ours]
    known = {name for one in DIFFERENCES for name in one.checks}
    bytes_reduced = BYTES | {name: world_size * part for name, part in PARTS.items()}
    for name in ours[0]:
        seen, reduced = zip(*(rank[name] for rank in ours), strict=True)
        same = all(alike(name, rank[name][0], one) for rank, one in zip(gloo, seen, strict=True))
        if name.startswith(SAME_EVERYWHERE):
            same = same and all(one == seen[0] for one in seen)
        assert same == (name not in known), (name, [rank[name][0] for rank in gloo], seen)
        if name in bytes_reduced or name.startswith(BY_GLOO):
            assert set(reduced) == {bytes_reduced.get(name, 0)}, name
        if name.startswith(BY_REDUCERS_AS_WELL):
            assert all(reduced), name
    return set(ours[0])


def test_the_page_says_what_differs():
    assert table() in (ROOT / "docs/frameworks.md").read_text()


@pytest.mark.extended("tests/integration/test_torch_backend.py::test_a_script_sees")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_check(world_size):
    with local_pool(2) as servers:
        names = check(world_size, servers=servers)
    assert len(names) >= 240
    assert {*BYTES, *PARTS, *(name for one in DIFFERENCES for name in one.checks)} <= names
    for begins in (*BY_REDUCERS_AS_WELL, *BY_GLOO, *SAME_EVERYWHERE):
        assert any(name.startswith(begins) for name in names), begins
