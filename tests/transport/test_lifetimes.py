"""Compiled loops while other threads use them, and while nobody has them any more.

What goes wrong here shows under the sanitizers: `make sanitize-threads`, `make sanitize`.
"""

import gc
import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from reducer import kernels
from reducer.engine import _slots
from reducer.engine.actions import Send
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.runtime.transport import Transport
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode
from tests.conftest import reducer_here
from tests.transport.scripted import MIB
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.spec import JobSpec

reducer_loop = pytest.importorskip("reducer.runtime._loop", reason="needs the compiled loop")
worker_loop = pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
CONNECTIONS = 100  # the table of them grows four times


def beside(act, meanwhile):
    """Do one thing in a thread, and another one again and again until that is done."""
    with ThreadPoolExecutor(1) as thread:
        doing = thread.submit(act)
        while not doing.done():
            meanwhile()
    return doing.result()


def test_a_connection_is_looked_up_while_others_come():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        sockets = reducer_loop.Sockets(listener.fileno())
        met = beside(
            lambda: [sockets.meet() for _ in range(CONNECTIONS)],
            lambda: sockets.is_suspended(1) or sockets.load(1),
        )
        assert len(met) == CONNECTIONS
        sockets.end(0)


def test_a_loop_may_be_woken_while_it_ends_and_afterwards():
    flight = CompiledFlight(Header(MessageType.HELLO))
    for _ in range(50):
        loop = worker_loop.Loop(flight, 1.0)
        core = worker_loop.Core(flight, loop)
        beside(lambda loop=loop: loop.end(0), lambda core=core: core.call() or core.resume(False))
        core.call()


def test_a_loop_that_cannot_be_made_closes_nobodys_file():
    kept = os.dup(0)
    try:
        for wrong in ("no flight", None):
            with pytest.raises(TypeError):
                worker_loop.Loop(wrong, 1.0)
        with pytest.raises(TypeError):
            reducer_loop.Sockets(None, "seconds")
        os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_reducer_that_only_a_collector_finds_gives_up_its_rounds():
    transport = Transport("tcp://127.0.0.1:0")
    table = kernels.select(None)
    engine = Engine(table, _slots, ReducerIdentity("1", "here:1"), memory_limit=MIB)
    with closing(transport):
        core = reducer_loop.Core(engine, transport)
        common = Header(MessageType.HELLO, job=fingerprint("job"), window=1 << 16)
        hello = Hello(job="job", world_size=2, reducers=1, reducer_index=0, chunk_bytes=1 << 16)
        for rank in range(2):
            peer, said = bytes([rank + 1] * 7), common._replace(rank=rank).pack()
            for action in engine.receive(peer, said, encode(hello)):
                if not isinstance(action, Send):
                    core.perform(action)
        chunk = common._replace(
            type=MessageType.CONTRIBUTION,
            sequence=1,
            total_bytes=4,
            nbytes=4,
            window=0,
            dtype=DType.FLOAT32,
            op=ReduceOp.SUM,
            wire_dtype=DType.FLOAT32,
        )
        assert core.offer(bytes([1] * 7), chunk.pack(), bytes(4)) == [], "its slot holds a payload"
    # As a lane keeps its frames that has failed, and these keep the lane.
    engine.keeps = [core]
    del engine, transport
    gc.collect()  # from here on its lists begin with the core, which it so clears first
    del core
    gc.collect()


def test_a_rank_its_reducer_of_two_threads_and_callers_share_a_process():
    with ExitStack() as stack:
        hosted = stack.enter_context(reducer_here(threads=2))
        settings = WorkerConfig(timeout=20.0, connect_timeout=20.0)
        ranks = stack.enter_context(ThreadPoolExecutor(2))

        def join(rank):
            inproc = hosted.inproc if rank == 0 else {}  # the other one takes sockets
            spec = JobSpec("job", 0, rank, 2, (hosted.address,), MIB, inproc=inproc)
            return compose.client(settings, spec, server=None if rank else hosted)

        clients = [stack.enter_context(client) for client in ranks.map(join, range(2))]

        def reduce(client):
            for count in (1, 1000, 300_000):
                data = np.ones(count, np.float32)
                assert (client.all_reduce(data, op="sum").wait(20) == 2).all()
                works = [client.all_reduce(np.ones(10, np.float32)) for _ in range(10)]
                assert all((work.wait(20) == 1).all() for work in works)
                assert hosted.observer.status().lanes

        assert list(ranks.map(reduce, clients)) == [None, None]


HOLDERS = {
    "reducer": """
        from reducer.runtime._loop import Sockets

        def hold(keys):
            Sockets(keys=keys[:2])
    """,
    "worker": """
        import socket
        from reducer.wire.constants import MessageType
        from reducer.wire.header import Header
        from worker_client.protocol._flight import CompiledFlight
        from worker_client.runtime._loop import Loop

        def hold(keys):
            here, there = socket.socketpair()
            loop = Loop(CompiledFlight(Header(MessageType.HELLO)), 1.0)
            loop.add(0)
            loop.open(0, here.fileno(), keys)
            loop.close(0)
    """,
}
HOLD = """
import sys
{holder}
secret = bytes.fromhex(sys.stdin.readline())
for step in range(2):
    print("ready", flush=True)
    sys.stdin.readline()
    hold((b"p" * 32, secret, b"s" * 32))
"""


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer has terabytes of its own")
@pytest.mark.parametrize("side", HOLDERS)
def test_secret_keys_are_wiped(side):
    """No copy is left of a key but those that Python itself has."""
    secret = os.urandom(32)
    program = HOLD.format(holder=textwrap.dedent(HOLDERS[side]))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True
    ) as holder:
        copies = []
        for said in (secret.hex(), ""):
            holder.stdin.write(said + "\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "ready\n"
            copies.append(memory_of(holder.pid).count(secret))
        holder.kill()
    assert copies[0] >= 1
    assert copies[1] <= copies[0]


def memory_of(process):
    """What a process has written to its memory."""
    found = []
    maps = Path(f"/proc/{process}/maps").read_text(encoding="ascii").splitlines()
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(first)
                found.append(memory.read(last - first))
    return b"".join(found)
