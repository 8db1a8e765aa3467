"""Callers' threads that lead: numbers, deadlines and results as if the driver's own thread did."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from reducer.errors import ReductionTimeout
from reducer.wire.constants import PLACES, DType, ReduceOp
from tests import inside
from tests.worker_client.waits import at_all
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol._flight import Call
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import JobSpec

SIZES = (1, 0, 1000, 3, 5, 1 << 18, 7, 65536, 1 << 16)  # elements: some are cut, some are large
OPS = ("sum", "max", "min", "mean", "product")


@pytest.fixture
def two(pool, request, monkeypatch):
    """Two ranks of a job: callers' threads lead in the first alone."""

    def make(rank):
        spec = JobSpec(request.node.name, 0, rank, 2, tuple(pool), 0)
        return compose.client(WorkerConfig(timeout=20.0, connect_timeout=20.0), spec)

    with ExitStack() as stack:
        yield [stack.enter_context(make(rank)) for rank in range(2)]


def calls(client, count):
    """Make calls of many sizes, ops and types, some of them several at a time; the results."""
    made = []
    for call in range(count):
        data = np.full(SIZES[call % len(SIZES)], 2 + client.rank, np.float32)
        if call % 7 == 0:
            data = data.astype(np.float64)
        op = OPS[call % len(OPS)]
        weight = {"weight": 1.0 + client.rank} if op == "mean" and call % 3 == 0 else {}
        name = {"name": f"call {call}"} if call % 11 == 5 and not weight else {}
        made.append(client.all_reduce(data, op, **weight, **name))
        if call % 4:
            made[-1].wait(20)
    return [work.wait(20) for work in made]


def test_ranks_whose_callers_lead_number_calls_like_ranks_whose_callers_never_do(two):
    """Reducers compare the numbers of ranks, and the checksums of what they asked for before."""
    results = at_all(two, lambda client: calls(client, 400))
    for call, (mine, other) in enumerate(zip(*results, strict=True)):
        assert mine.tobytes() == other.tobytes()
        op = OPS[call % len(OPS)]
        mean = (2 * 1 + 3 * 2) / 3 if call % 3 == 0 else 2.5
        expected = {"sum": 5, "max": 3, "min": 2, "product": 6, "mean": mean}[op]
        assert np.allclose(mine, expected)


def test_all_reduces_of_one_call_follow_each_other(two):
    def call(client):
        for _ in range(100):  # from now on ranks agree seldom
            client.all_reduce(np.ones(2), "sum").wait(10)
        whole, core = Call(), inside.flat(client).core
        made = [
            Operation(memoryview(bytearray(4)), DType.INT32, ReduceOp.SUM, None, 10.0, call=whole)
            for _ in range(3)
        ]
        for operation in made:
            core.submit(operation)
        for operation in made:
            operation.wait(10)
        return made

    numbers = [[operation.sequence % PLACES for operation in made] for made in at_all(two, call)]
    assert numbers == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.usefixtures("eager")
def test_deadlines_are_those_that_the_session_sets(two):
    works = at_all(two, lambda client: client.all_reduce(np.ones(4), "sum", timeout=0.5))
    for work in works:
        work.wait(10)
    led, queued = (
        [round(at - work.begun, 9) for at in (work.deadline, work.ask_at, work.ask_last_at)]
        for work in works
    )
    assert led == queued
    assert led[0] == 0.5


def test_a_wait_ends_when_its_time_is_over(two):
    over = threading.Event()

    def call(client):
        for _ in range(100):  # from now on the caller leads
            client.all_reduce(np.ones(2), "sum").wait(10)
        if client.rank == 1:
            assert over.wait(10)
        work = client.all_reduce(np.ones(2), "sum")
        if client.rank == 0:
            with pytest.raises(ReductionTimeout, match="is still in progress"):
                work.wait(0.2)
            over.set()
        return work.wait(10)

    assert [result.tolist() for result in at_all(two, call)] == [[2, 2], [2, 2]]
