"""The pool is restarted, one reducer after the other, while ranks make calls: none of them fails.

The short form of `torture.rolling`.
"""

import signal
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from harness.pool import Pool
from lab import Lab
from reducer.errors import ReductionTimeout
from torture.rolling import roll
from worker_client.client.bootstrap import connect
from worker_client.protocol.failover import ADOPT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs need Linux")


@pytest.mark.extended("test_every_reducer_is_killed_and_replaced")
def test_a_rolling_restart_costs_no_call():
    check(roll(2, 2.0, 50.0, signal.SIGTERM))


def test_every_reducer_is_killed_and_replaced_while_a_call_waits():
    with Lab.loopback(2) as lab, ExitStack() as stack:
        pool = Pool(lab.hosts)
        stack.callback(pool.stop)
        common = {"servers": ",".join(pool.addresses), "world_size": 2, "job": "slow"}
        clients = [stack.enter_context(connect(rank=rank, **common)) for rank in range(2)]
        for call in range(3):
            data = [np.full(100_000, rank + call, np.float32) for rank in range(2)]
            first = clients[0].all_reduce(data[0], "sum")
            for reducer in range(2):
                pool.end(reducer, signal.SIGKILL)
                pool.start(reducer)
            second = clients[1].all_reduce(data[1], "sum")
            assert (first.wait(20) == 1 + 2 * call).all()
            assert (second.wait(20) == 1 + 2 * call).all()


@pytest.mark.extended_cases("2")
@pytest.mark.parametrize("count", [1, 2])  # as many reducers, and so many times
def test_a_call_waits_for_a_pool_that_is_gone(monkeypatch, count):
    monkeypatch.setenv("REDUCTION_WAIT_FOR_REDUCERS", "60s")
    with Lab.loopback(count) as lab, ExitStack() as stack:
        pool = Pool(lab.hosts)
        stack.callback(pool.stop)
        common = {"servers": ",".join(pool.addresses), "world_size": 2, "job": "waits"}
        clients = [stack.enter_context(connect(rank=rank, **common)) for rank in range(2)]
        for call in range(count):
            data = [np.full(100_000, rank + call, np.float32) for rank in range(2)]
            first = clients[0].all_reduce(data[0], "sum")
            for reducer in range(count):
                pool.end(reducer, signal.SIGKILL)
            with pytest.raises(ReductionTimeout, match="still in progress"):
                first.wait(ADOPT_S + 1)
            second = clients[1].all_reduce(data[1], "sum")
            pool.start(count - 1)
            assert (first.wait(20) == 1 + 2 * call).all()
            assert (second.wait(20) == 1 + 2 * call).all()
            for reducer in range(count - 1):
                pool.start(reducer)


@pytest.mark.extended("test_every_reducer_is_killed_and_replaced")
@pytest.mark.parametrize("pace", [1.0, 50.0, 500.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rolling_restarts_at_other_paces(pace, number):
    check(roll(3, 3.0, pace, number))


def check(said):
    for rank in said:
        assert rank["errors"] == []
        assert rank["wrong"] == 0
        assert all(rank["in_use"])
