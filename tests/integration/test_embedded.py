"""No pool: every rank hosts a reducer, and they find each other through the process group."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from reducer import local_pool
from tests.integration.launch import rank_environment

pytest.importorskip("torch", reason="needs torch")

START = """
import os, time, numpy, torch, torch.distributed as dist, worker_client
from reducer import kernels
from reducer.wire.constants import DType, ReduceOp
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
client = worker_client.init()
"""
EXACT = """
assert len(client.settings.reducers) == {reducers}
for step in range(20):
    rows = [numpy.random.default_rng([step, r]).standard_normal(100_003) for r in range(n)]
    rows = [row.astype(numpy.float32) for row in rows]
    expected = numpy.empty_like(rows[0])
    kernels.select("numpy").reduce(rows, expected, DType.FLOAT32, ReduceOp.MEAN)
    mine = torch.from_numpy(rows[rank].copy())
    client.all_reduce(mine).wait(20)
    assert mine.numpy().tobytes() == expected.tobytes()
"""
# Ranks leave at different times and in different order: nobody may miss its last result.
LEAVE = """
print("exact", flush=True)
time.sleep(0.3 * ((rank + {turn}) % n))
"""
ENDLESS = """
data = torch.ones(1_000_000)
client.all_reduce(data).wait()
print("started", flush=True)
while True:
    client.all_reduce(data).wait()
"""


def heed_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background: they, and their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def ranks(world_size: int, code: str, **settings: str):
    environment = rank_environment(world_size, **settings)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", START + code],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509 (no thread of this process holds a lock)
        )
        for rank in range(world_size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_bits_and_leaving_in_any_order(turn: int) -> None:
    with ranks(3, EXACT.format(reducers="n") + LEAVE.format(turn=turn)) as started:
        for process in started:
            out, err = process.communicate(timeout=50)
            assert (process.returncode, out) == (0, "exact\n"), err


@pytest.mark.parametrize(
    ("pool", "reducers"), [(1, "1 + n"), (2, "2 + n"), (3, "3")], ids=["one", "two", "enough"]
)
def test_a_small_pool_is_helped_by_the_ranks(pool: int, reducers: str) -> None:
    with local_pool(pool) as servers:
        settings = {"REDUCTION_SERVERS": ",".join(servers), "REDUCTION_EMBEDDED": "1"}
        code = EXACT.format(reducers=reducers) + LEAVE.format(turn=0)
        with ranks(3, code, **settings) as started:
            for process in started:
                out, err = process.communicate(timeout=50)
                assert (process.returncode, out) == (0, "exact\n"), err


def interrupted_in() -> float:
    """Seconds from Ctrl-C in the middle of a loop until every rank is gone."""
    with ranks(3, ENDLESS) as started:
        for process in started:
            assert process.stdout.readline() == "started\n"
        time.sleep(0.5)
        start = time.monotonic()
        for process in started:
            process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs([psutil.Process(p.pid) for p in started], timeout=20)
        assert not alive
        seconds = time.monotonic() - start
        assert all("KeyboardInterrupt" in process.stderr.read() for process in started)
        return seconds


@pytest.mark.timeout(120)
def test_ctrl_c_in_the_middle_ends_every_rank() -> None:
    # Most of it is the interpreter with torch in it; a busy machine can slow one try, not all.
    assert any(interrupted_in() < 2 for _ in range(4))
