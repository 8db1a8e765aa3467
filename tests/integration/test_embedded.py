"""No pool: every rank hosts a reducer, and they find each other through the process group."""

import signal
import socket
import time
from contextlib import ExitStack

import pytest

from reducer.errors import RankLostError
from tests.ranks import environments, ranks
from tests.waits import within_s
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol.spec import JobSpec

pytest.importorskip("torch", reason="needs torch")

ENDLESS = """
import torch, torch.distributed as dist, worker_client
dist.init_process_group("gloo")
client = worker_client.init()
data = torch.ones(1_000_000)
client.all_reduce(data).wait()
print("started", flush=True)
while True:
    client.all_reduce(data).wait()
"""


def test_ctrl_c_in_the_middle_ends_every_rank():
    took = []
    # Most of it is the interpreter with torch in it; a busy machine can slow one try, not all.
    while not took or (took[-1] > 2 and len(took) < 4):
        with ranks(environments(3), "-c", ENDLESS, talk=True) as job:
            assert [rank.stdout.readline() for rank in job] == ["started\n"] * 3
            time.sleep(0.5)
            start = time.monotonic()
            for rank in job:
                rank.send_signal(signal.SIGINT)
            for rank in job:
                rank.wait(20)
            took.append(time.monotonic() - start)
            # On a busy machine one may hear that another has left before it hears its own signal.
            said = [rank.err for rank in job]
            assert any("KeyboardInterrupt" in text for text in said)
            assert all("KeyboardInterrupt" in one or "RankLostError" in one for one in said), said
    assert took[-1] < 2


BUSY = """
import ctypes, os, signal, sys, threading, time
import numpy, torch, torch.distributed as dist
import worker_client
from reducer.errors import RankLostError
from tests.ranks import write_result
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
"""
# Rank 1 is held back, as by a busy host, until rank 0 has joined and holds its interpreter.
LATE = """
if rank == 1:
    from worker_client.client import compose
    begin = compose.client
    def late(*arguments, **named):
        store.wait(["busy"])
        return begin(*arguments, **named)
    compose.client = late
client = worker_client.init(connect_timeout="1s")
if rank == 0:
    store.set("busy", "1")
    ctypes.PyDLL(None).usleep(3_500_000)  # with the GIL, as an import or an extension
mine = numpy.full(120_576, rank + 1.0, numpy.float32)
client.all_reduce(mine).wait(5)
write_result([client.in_use, float(mine.min()), float(mine.max())])
"""
GONE = """
from worker_client.client import compose
begin = compose.client
def late(*arguments, **named):
    store.set(f"hosts {rank}", "1")
    store.wait([f"hosts {1 - rank}"])
    store.set(f"knows {rank}", "1")
    if rank == 0:  # which has the store: rank 1 asks it nothing any more
        store.wait(["knows 1"])
        os.kill(os.getpid(), signal.SIGKILL)
    return begin(*arguments, **named)
compose.client = late
since = time.monotonic()
try:
    worker_client.init()
except RankLostError as error:
    write_result([error.rank, str(error), time.monotonic() - since])
"""


def test_a_host_that_is_busy_at_the_start_is_waited_for():
    with ranks(environments(2), "-c", BUSY + LATE) as job:
        assert job.results(30) == [[[True, True], 1.5, 1.5]] * 2
        said = "rank 0, whose reducer is 127.0.0.1:"
        assert said in job[1].err
        assert "does not answer yet: waiting for" in job[1].err


def test_a_host_that_dies_at_the_start_is_named():
    with ranks(environments(2), "-c", BUSY + GONE) as job:
        ((rank, message, seconds),) = job.results(30, killed=[0])
    assert rank == 0
    assert "rank 0, whose reducer is 127.0.0.1:" in message
    assert "cannot be reached: Connection refused" in message
    assert seconds < 15, "not when calls or the start time out"


def unanswered(stack):
    """Where the kernel drops what would connect, as a network does that is cut."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(2):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_many_hosts_that_are_cut_off_are_noticed_as_soon_as_one():
    with ExitStack() as stack:
        reducers = tuple(unanswered(stack) for _ in range(5))
        spec = JobSpec("job", 0, 5, 6, reducers, 1 << 20, hosts={at: at for at in range(5)})
        since = time.monotonic()
        with pytest.raises(RankLostError, match="cannot be reached: timed out"):
            compose.client(WorkerConfig(timeout=10.0, connect_timeout=1.5), spec)
        within_s(6.0, since)
