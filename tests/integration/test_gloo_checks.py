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


class Difference(NamedTuple):
    """What a script sees over one backend and not over the other.

    Attributes:
        checks: their names.
        what: is done.
        gloo: what becomes of it over Gloo.
        ours: and over the backend.
        why: they differ.
    """

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


def found(backend, world_size, *names):
    """Return what each rank sees over a backend, of all checks or of these."""
    with local_pool(2) as servers:
        return run(environments(world_size, servers), *RANK, backend, *names)


def found_of_gloo(world_size):
    """Return what each rank sees over Gloo, once its groups connect.

    Now and then two members of a group that its method has split do not find each other in 30 s
    (torch 2.13, two cores): those checks are made again.
    """
    ranks = found("gloo", world_size)
    apart = [
        name for name in ranks[0] if any("connectFullMesh" in str(rank[name]) for rank in ranks)
    ]
    if apart:
        again = found("gloo", world_size, ";".join(apart))
        ranks = [rank | other for rank, other in zip(ranks, again, strict=True)]
    return ranks


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


def compared(world_size):
    """Return of each check whether all ranks see the same over both."""
    gloo, ours = found_of_gloo(world_size), found("reduction", world_size)
    assert [list(rank) for rank in gloo] == [list(rank) for rank in ours]
    return {
        name: all(
            alike(name, one[name], other[name]) for one, other in zip(gloo, ours, strict=True)
        )
        for name in gloo[0]
    }


def test_the_page_says_what_differs():
    assert table() in (ROOT / "docs/frameworks.md").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_check(world_size):
    same = compared(world_size)
    assert len(same) >= 300
    differ = {name for name, alike in same.items() if not alike}
    assert differ == {name for one in DIFFERENCES for name in one.checks}
