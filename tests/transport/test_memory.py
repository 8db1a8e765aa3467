"""Whose memory it is: until when a buffer is read, and by whom."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import zmq

from reducer.errors import LocalProtocolError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import Header
from tests.engine.words import number
from tests.transport.scripted import CHUNK, MIB, M, Reducer, ramp
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import Heartbeats
from worker_client.runtime import implementation
from worker_client.runtime.transport import Completed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker_client.client.client import Client
    from worker_client.protocol._flight import CompiledFlight
    from worker_client.runtime.transport import Transport
    from worker_client.work import Work

# -- whose memory it is ---------------------------------------------------------------------------


class Stalled(NamedTuple):
    """An all-reduce whose messages lie in its buffer, because the reducer reads nothing."""

    data: np.ndarray
    work: Work
    ended: threading.Event


@pytest.fixture
def stalled(joined: Callable) -> tuple[Client, Reducer, Stalled]:
    """A client, a reducer that does not read, and an all-reduce that cannot leave."""
    # Who does not read answers no heartbeats.
    patient = Heartbeats(patience_s=60.0)
    client, (reducer,) = joined(window=64 * MIB, receive_limit=1 << 16, heartbeats=patient)
    data = ramp(48 * MIB)
    work = client.all_reduce(data, op="max")
    ended = threading.Event()

    def overwrite(_: object) -> None:
        data[:] = 255  # which `ramp` never is
        ended.set()

    work.future().add_done_callback(overwrite)
    time.sleep(0.1)  # until all buffers in between are full
    return client, reducer, Stalled(data, work, ended)


def test_a_failed_buffer_is_given_back_when_nothing_reads_it(stalled: tuple) -> None:
    _, reducer, (data, work, ended) = stalled
    reducer.fail(number(0))
    assert not ended.wait(0.3), "the error came although the buffer is still being sent"
    seen = 0
    while seen < len(data):
        _, *frames = reducer.socket.recv_multipart(copy=False)
        assert Header.unpack(frames[0].buffer).offset == seen
        payload = np.frombuffer(frames[1].buffer, np.uint8)
        assert payload.max() < 255, "what the caller wrote later has left"
        seen += len(payload)
    assert ended.wait(5)
    with pytest.raises(ReductionTimeout):
        work.wait(0)


def test_a_broken_connection_reads_no_buffer(stalled: tuple) -> None:
    _, reducer, (_, work, ended) = stalled
    reducer.socket.close()
    assert ended.wait(5)
    with pytest.raises(ReducerLostError):
        work.wait(0)


def test_shutting_down_gives_every_buffer_back(stalled: tuple) -> None:
    client, _, (_, work, ended) = stalled
    start = time.monotonic()
    client.shutdown()
    assert ended.is_set()
    assert time.monotonic() - start < 3.0
    with pytest.raises(LocalProtocolError):
        work.wait(0)


# -- reducers in this process ---------------------------------------------------------------------


class Inside(NamedTuple):
    """A compiled transport without a client, and reducers that it reaches without a network."""

    flight: CompiledFlight
    transport: Transport
    reducers: list[zmq.Socket]


@pytest.fixture
def inside(context: zmq.Context) -> Iterator[Inside]:
    """Two links whose messages arrive as soon as they are sent."""
    compiled = implementation.select("compiled")
    flight: Any = compiled.flight(Header(M.HELLO))
    transport = compiled.transport(flight, 1, context)
    reducers = [context.socket(zmq.ROUTER) for _ in range(2)]
    for link, reducer in enumerate(reducers):
        reducer.rcvhwm = reducer.sndhwm = 0
        reducer.bind(f"inproc://reducer-{link}")
        flight.add_link(1 << 30, keep=False)
        flight.open(link)
        transport.connect(f"inproc://reducer-{link}")
    yield Inside(flight, transport, reducers)
    transport.close()
    for reducer in reducers:
        reducer.close()


def test_a_busy_link_keeps_another_ones_completion_waiting_for_moments(inside: Inside) -> None:
    flight, transport, reducers = inside
    long, short = (memoryview(bytearray(size)) for size in (500 * CHUNK, 8))
    for view, link in ((long, 0), (short, 1)):
        operation = Operation(view, DType.UINT8, ReduceOp.MAX, None, 1.0)
        operation.sequence = link
        flight.submit(operation, [LinkShard(link, 0, view.nbytes)], CHUNK, 0)
    transport.refill()
    for reducer, chunks in zip(reducers, (500, 1), strict=True):
        for _ in range(chunks):
            peer, frame, payload = reducer.recv_multipart(zmq.NOBLOCK)
            header = Header.unpack(frame)._replace(
                type=M.RESULT, rank=0, watermark=0, since=0, history=0
            )
            reducer.send_multipart([peer, header.pack(), payload])
    done: list[list[int]] = []
    while len(done) < 2:
        transport.wait(5)
        done += [e.sequences for e in transport.events() if isinstance(e, Completed)]
    assert done == [[1], [0]]


@pytest.mark.parametrize("nbytes", [CHUNK, 2 * MIB])
def test_a_reducer_in_this_process_sees_that_memory_is_shared(inside: Inside, nbytes: int) -> None:
    flight, transport, (reducer, _) = inside
    data = bytearray(nbytes)
    for sequence in range(2):
        address = np.frombuffer(data, np.uint8).ctypes.data
        mine = Operation(memoryview(data), DType.UINT8, ReduceOp.MAX, None, 1.0)
        mine.sequence = sequence
        flight.submit(mine, [LinkShard(0, 0, nbytes)], nbytes, 0)
        transport.refill()
        _, header, payload = reducer.recv_multipart(copy=False)
        assert Header.unpack(header.buffer).sequence == mine.sequence
        assert payload.get(zmq.SHARED) == 1
        received = np.frombuffer(payload.buffer, np.uint8)
        assert received.ctypes.data == address  # no copy was made
        flight.end(mine.sequence)
        assert transport.reads(mine)
        mine.view = memoryview(b"")
        with pytest.raises(BufferError):  # the flight looks at it
            data.append(0)
        del received, payload
        assert not transport.reads(mine)
        data.append(0)
        data.pop()
