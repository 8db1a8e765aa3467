"""`torture.guarantee` for some seconds; and that what it would find is found."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from lab import LabUnavailable
from torture.guarantee import attack
from torture.guarantee_judge import Judge
from torture.guarantee_oracle import TYPES, Oracle, Shape
from torture.guarantee_plan import MAIN, Call, Plan, Trouble
from torture.guarantee_topologies import TOPOLOGIES

linux = pytest.mark.skipif(sys.platform != "linux", reason="takes sockets of other processes")
PLAN = Plan("a test", ranks=3, extras=True, wire_dtype="bf16", troubles=0.0)
CALL = Call(
    key=(MAIN, 0, 0),
    name=None,
    dtype="float32",
    op="sum",
    elements=100,
    strided=False,
    weights=None,
    residual=False,
    timeout_s=None,
    trouble=None,
    near=False,
)


def check(topology, faults, results=500):
    try:
        found = attack(topology, results, faults, seed=8)
    except LabUnavailable as error:
        pytest.skip(str(error))
    # A machine that is busy enough lets a call time out while a reducer is replaced.
    grave = [
        finding
        for finding in found.findings
        if finding["kind"] != "needless error" or re.search(r"\w+Error:", str(finding["detail"]))
    ]
    assert not grave, "\n".join(f"{one['kind']}: {one['detail']}\n{one['words']}" for one in grave)
    assert found.results >= results
    assert sum(found.faults.values()) >= faults
    return found


@linux
def test_gradients_of_ddp_and_tensors_are_right():
    assert check("embedded", 0, results=150).counts["right gradient"] > 0


@linux
def test_connections_to_far_reducers_break_and_cost_no_call():
    check("far", 1, results=150)


@pytest.mark.extended("test_gradients_of_ddp_and_tensors_are_right")
@linux
def test_every_result_is_right_or_an_error_in_time():
    check("pool", 2)


@pytest.mark.extended("test_gradients_of_ddp_and_tensors_are_right")
@linux
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology(topology):
    check(topology, 10)


def test_calls_are_the_same_at_every_rank_and_of_all_kinds():
    calls = [call for step in range(300) for call in PLAN.step(MAIN, step)]
    assert calls == [call for step in range(300) for call in replace(PLAN).step(MAIN, step)]
    assert {call.dtype for call in calls} == set(TYPES)
    assert {bool(call.weights) for call in calls} == {True, False}
    assert {call.residual for call in calls} == {True, False}
    assert {call.name is None for call in calls} == {True, False}


def test_the_oracle_knows_the_order_of_additions():
    oracle = Oracle("values", exact=False)
    rows = [oracle.contribution(CALL, rank) for rank in range(3)]
    with np.errstate(all="ignore"):
        left, right = (rows[0] + rows[1]) + rows[2], rows[0] + (rows[1] + rows[2])
    assert oracle.result(CALL, Shape(((0, 1, 2),))).tobytes() != right.tobytes()
    finite = np.isfinite(left)
    assert (oracle.result(CALL, Shape(((0, 1, 2),)))[finite] == left[finite]).all()


def judge(call, got, *, elastic=False, present=(0, 1)):
    plan = replace(PLAN, wire_dtype="")
    one = Judge(plan, 0, "values", exact=False, nodes=None, elastic=elastic)
    return one.judge(call, got, None, present)


def test_what_is_wrong_is_found_and_explained():
    oracle = Oracle("values", exact=False)
    everybody = Shape(((0, 1, 2),))
    right = oracle.result(CALL, everybody)
    assert judge(CALL, right) == ""
    torn = right.copy()
    torn[50:] = oracle.result(CALL, Shape(((0, 1),)))[50:]
    assert "of 100 elements differ; the first at 50" in judge(CALL, torn)
    partial = oracle.result(CALL, Shape(((0, 1),)))
    assert "the reduction of ranks (0, 1)" in judge(CALL, partial)
    assert judge(CALL, partial, elastic=True) == ""
    assert "differ" in judge(CALL, torn, elastic=True)
    shifted = PLAN.step(MAIN, 3)[0].key
    other = oracle.result(CALL._replace(key=shifted), everybody)
    assert f"the result of call {shifted}" in judge(CALL, other)


@pytest.mark.parametrize("kind", ["refuse", "decline", "disagree"])
def test_a_result_without_a_rank_that_takes_no_part_is_none(kind):
    call = CALL._replace(trouble=Trouble(kind, 1, 0.5))
    oracle = Oracle("values", exact=False)
    assert "there can be none" in judge(call, oracle.result(call, Shape(((0, 1, 2),))))
    without = oracle.result(call, Shape(((0, 2),)))
    assert "there can be none" in judge(call, without)
    assert judge(call, without, elastic=True, present=(0, 2)) == ""
    whole = oracle.result(call, Shape(((0, 1, 2),)))
    assert "took no part" in judge(call, whole, elastic=True, present=(0, 2))
    # A result of no elements is that of any ranks.
    empty = call._replace(elements=0)
    nothing = oracle.result(empty, Shape(((0, 2),)))
    assert judge(empty, nothing, elastic=True, present=(0, 2)) == ""
