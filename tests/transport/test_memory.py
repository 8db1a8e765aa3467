"""Whose memory it is: until when a buffer is read, and by whom."""

import ctypes
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest

from reducer.errors import LocalProtocolError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import Header
from tests.engine.words import number
from tests.transport.scripted import CHUNK, MIB, M, Reducer, comes, meet, ramp, result
from tests.waits import eventually, within_s
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation
from worker_client.runtime.events import Completed
from worker_client.runtime.transport import Transport


@pytest.fixture
def stalled(joined):
    """A client, a reducer that does not read, and an all-reduce that cannot leave its buffer."""
    client, (reducer,) = joined(window=64 * MIB, kind=lambda: Reducer(receive_bytes=1 << 16))
    data = ramp(48 * MIB)
    work = client.all_reduce(data, op="max")
    ended = threading.Event()

    def overwrite(_):
        data[:] = 255  # which `ramp` never is
        ended.set()

    work.future().add_done_callback(overwrite)
    time.sleep(0.1)  # until all buffers in between are full
    return client, reducer, data, work, ended


@pytest.mark.parametrize("fails", [True, False])
def test_a_buffer_is_given_back_whole_at_once(stalled, fails):
    """What has yet to leave of it was copied before: if it fails, or results come early.

    As where another rank has told the reducer what came out.
    """
    _, reducer, data, work, ended = stalled
    seen = 0
    if fails:
        reducer.fail(number(0))
    else:
        first, results, seen = reducer.hear(M.CONTRIBUTION), comes(data), CHUNK
        for at in range(0, len(data), CHUNK):
            reducer.answer(first, offset=at, payload=results[at : at + CHUNK])
    assert ended.wait(1 if fails else 20), "that waits until the reducer reads"
    while seen < len(data):
        heard = reducer.hear(M.CONTRIBUTION)
        assert heard.header.offset == seen
        assert heard.payload.max() < 255, "what the caller wrote later has left"
        seen += len(heard.payload)
    if fails:
        with pytest.raises(ReductionTimeout):
            work.wait(0)
    else:
        assert work.wait(0) is not None


def test_a_broken_connection_reads_no_buffer(stalled):
    _, reducer, _, work, ended = stalled
    reducer.close()
    assert ended.wait(5)
    with pytest.raises(ReducerLostError):
        work.wait(0)


def test_shutting_down_gives_every_buffer_back(stalled):
    client, _, _, work, ended = stalled
    start = time.monotonic()
    client.shutdown()
    assert ended.is_set()
    within_s(3.0, start)
    with pytest.raises(LocalProtocolError):
        work.wait(0)


HOSTED, POOL = {0: 1}, {}  # rank 1 hosts the only reducer, or nobody does


@pytest.fixture(params=[HOSTED, POOL], ids=["hosted", "of a pool"])
def both(joined, request):
    """A client, and its only reducer."""
    client, (reducer,) = joined(hosts=request.param)
    return client, reducer


def half_read(client, reducer, data, **timeout):
    """Begin an all-reduce, and send half of its only result; return what is left of that."""
    work = client.all_reduce(data, op="max", **timeout)
    said = result(reducer.hear(M.CONTRIBUTION), b"\xff" * CHUNK)
    reducer.send(said[: -CHUNK // 2])
    return work, said[-CHUNK // 2 :]


@pytest.mark.parametrize(("both", "early"), [(HOSTED, True), (POOL, False)], indirect=["both"])
def test_only_what_no_other_reducer_may_need_is_in_its_place_before_it_is_whole(both, early):
    client, reducer = both
    data = ramp(CHUNK)
    work, rest = half_read(client, reducer, data)
    if early:
        eventually(lambda: not (data[: CHUNK // 2] != 255).any(), 2.0)
        assert (data[CHUNK // 2 :] == ramp(CHUNK)[CHUNK // 2 :]).all()
    else:
        time.sleep(0.3)
        assert (data == ramp(CHUNK)).all()
    reducer.send(rest)
    assert (work.wait(5) == 255).all()


def test_nothing_is_read_into_a_buffer_that_the_caller_has_again(both):
    client, reducer = both
    data = ramp(CHUNK)
    work, rest = half_read(client, reducer, data, timeout="0.5s")
    with pytest.raises(ReductionTimeout):
        work.wait()
    data[:] = 7
    reducer.send(rest)
    work = client.all_reduce(ramp(3 * CHUNK), op="max")
    answered = 0
    while answered < 3:
        heard = reducer.hear()
        if heard.header.type is M.CONTRIBUTION:  # and no question of who is late
            reducer.answer(heard)
            answered += 1
    assert (work.wait(5) == comes(ramp(3 * CHUNK))).all()
    assert (data == 7).all()


class Alone(NamedTuple):
    """A compiled transport without a client, and reducers that it has reached."""

    flight: CompiledFlight
    transport: Transport
    reducers: list[Reducer]

    def submit(self, link, nbytes):
        """Begin an all-reduce over a link; return what its reducer hears."""
        data = memoryview(bytearray(nbytes))
        operation = Operation(data, DType.UINT8, ReduceOp.MAX, None, 1.0)
        operation.sequence = link
        shards = [LinkShard(link, 0, nbytes)]
        self.flight.submit(operation, shards, CHUNK, 0, time.monotonic())
        self.transport.refill()
        with ThreadPoolExecutor(1) as thread:
            heard = thread.submit(self.reducers[link].hear_chunks, -(-nbytes // CHUNK))
            while not heard.done():
                self.transport.wait(0.001)
                assert not list(self.transport.events())
        return heard.result()


@pytest.fixture
def alone():
    flight = CompiledFlight(Header(M.HELLO))
    with ExitStack() as stack:
        reducers = [stack.enter_context(closing(Reducer())) for _ in range(2)]
        transport = stack.enter_context(closing(Transport(flight)))
        for link, reducer in enumerate(reducers):
            flight.add_link(1 << 30, retain=True)
            flight.open(link)
            transport.connect(reducer.address)
        meet(transport, *reducers)
        yield Alone(flight, transport, reducers)


def test_a_busy_link_keeps_another_ones_completion_waiting_for_moments(alone):
    long, short = alone.submit(0, 500 * CHUNK), alone.submit(1, 8)
    busy = threading.Thread(target=alone.reducers[0].send, args=[b"".join(map(result, long))])
    busy.start()
    alone.reducers[1].answer(*short)
    done = []
    while len(done) < 2:
        alone.transport.wait(5)
        done += [e for e in alone.transport.events() if isinstance(e, Completed)]
    busy.join()
    assert [[operation.sequence for operation in each] for each in done] == [[1], [0]]


def test_what_has_just_completed_is_there_when_a_link_is_reset(alone):
    """Else its results would never be claimed at another reducer, whose ranks wait for them."""
    flight, transport, (reducer, _) = alone
    reducer.answer(*alone.submit(0, 8))
    transport.wait(5)  # it has come, and nobody has been told
    transport.reset(0)
    assert [chunk.done for chunk in flight.carried(0)] == [True]
    (completed,) = (event for event in transport.events() if isinstance(event, Completed))
    assert [operation.sequence for operation in completed] == [0]


# Begins and ends a reducer and its worker in turn, and prints how many bytes each life leaves
# allocated: the median over four lives, as Python's own tables grow in one and shrink in the next.
LIVES = """
import ctypes, gc
from statistics import median
import numpy as np, worker_client
from reducer.config import load
from reducer.server import Server

class Heap(ctypes.Structure):
    _fields_ = [(f"field{at}", ctypes.c_size_t) for at in range(7)] + [
        ("uordblks", ctypes.c_size_t), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)
    ]

heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap

def live():
    server = Server(load(bind="tcp://127.0.0.1:0"))
    server.start()
    with worker_client.init(servers=[server.address], rank=0, world_size=1) as client:
        for size in (1, 100_000) * 10:
            client.all_reduce(np.ones(size)).wait(20)
    server.stop()
    gc.collect()
    return heap().uordblks

taken = [live() for _ in range(24)]
print(median(late - early for early, late in zip(taken[4:], taken[8:])) / 4)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 tells")
def test_what_ends_gives_all_its_memory_back():
    done = subprocess.run([sys.executable, "-c", LIVES], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200  # bytes, which caches of names take; a chunk has some hundreds
