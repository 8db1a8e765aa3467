"""Whose memory it is: until when a buffer is read, and by whom."""

import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import zmq

from reducer.errors import LocalProtocolError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import Header
from tests.engine.words import number
from tests.transport.scripted import CHUNK, MIB, M, ramp
from tests.waits import within_s
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import Heartbeats
from worker_client.runtime import implementation
from worker_client.runtime.transport import Completed, Connected, Transport
from worker_client.work import Work

# -- whose memory it is ---------------------------------------------------------------------------


class Stalled(NamedTuple):
    """An all-reduce whose messages lie in its buffer, because the reducer reads nothing."""

    data: np.ndarray
    work: Work
    ended: threading.Event


@pytest.fixture
def stalled(joined):
    """A client, a reducer that does not read, and an all-reduce that cannot leave."""
    # Who does not read answers no heartbeats.
    patient = Heartbeats(patience_s=60.0)
    client, (reducer,) = joined(window=64 * MIB, receive_limit=1 << 16, heartbeats=patient)
    data = ramp(48 * MIB)
    work = client.all_reduce(data, op="max")
    ended = threading.Event()

    def overwrite(_):
        data[:] = 255  # which `ramp` never is
        ended.set()

    work.future().add_done_callback(overwrite)
    time.sleep(0.1)  # until all buffers in between are full
    return client, reducer, Stalled(data, work, ended)


def test_a_failed_buffer_is_given_back_at_once(stalled):
    """What has yet to leave of it was copied before."""
    _, reducer, (data, work, ended) = stalled
    reducer.fail(number(0))
    assert ended.wait(1), "the error waits until the reducer reads"
    seen = 0
    while seen < len(data):
        _, *frames = reducer.socket.recv_multipart(copy=False)
        assert Header.unpack(frames[0].buffer).offset == seen
        payload = np.frombuffer(frames[1].buffer, np.uint8)
        assert payload.max() < 255, "what the caller wrote later has left"
        seen += len(payload)
    with pytest.raises(ReductionTimeout):
        work.wait(0)


def test_a_buffer_whose_results_come_early_is_given_back_whole(stalled):
    """As where another rank has told the reducer what came out."""
    _, reducer, (data, work, ended) = stalled
    first = reducer.hear(M.CONTRIBUTION)
    results = data + np.uint8(1)
    for at in range(0, len(data), CHUNK):
        reducer.answer(first, offset=at, payload=results[at : at + CHUNK])
    assert ended.wait(20)
    assert work.wait(0) is not None
    seen = CHUNK
    while seen < len(data):
        _, *frames = reducer.socket.recv_multipart(copy=False)
        payload = np.frombuffer(frames[1].buffer, np.uint8)
        assert payload.max() < 255, "what the caller wrote later has left"
        seen += len(payload)


def test_a_broken_connection_reads_no_buffer(stalled):
    _, reducer, (_, work, ended) = stalled
    reducer.socket.close()
    assert ended.wait(5)
    with pytest.raises(ReducerLostError):
        work.wait(0)


def test_shutting_down_gives_every_buffer_back(stalled):
    client, _, (_, work, ended) = stalled
    start = time.monotonic()
    client.shutdown()
    assert ended.is_set()
    within_s(3.0, start)
    with pytest.raises(LocalProtocolError):
        work.wait(0)


# -- two links ------------------------------------------------------------------------------------


class Alone(NamedTuple):
    """A compiled transport without a client, and reducers that it has reached."""

    flight: CompiledFlight
    transport: Transport
    reducers: list[zmq.Socket]


@pytest.fixture
def alone(context):
    compiled = implementation.select("compiled")
    flight = compiled.flight(Header(M.HELLO))
    transport = compiled.transport(flight, 1)
    reducers = [context.socket(zmq.ROUTER) for _ in range(2)]
    for link, reducer in enumerate(reducers):
        reducer.rcvhwm = reducer.sndhwm = 0
        port = reducer.bind_to_random_port("tcp://127.0.0.1")
        flight.add_link(1 << 30, keep=True)
        flight.open(link)
        transport.connect(f"127.0.0.1:{port}")
    reached = set()
    while reached != {0, 1}:
        transport.wait(5)
        reached |= {event.link for event in transport.events() if isinstance(event, Connected)}
    yield Alone(flight, transport, reducers)
    transport.close()
    for reducer in reducers:
        reducer.close()


def receive(transport, reducer):
    """Receive a message that the transport may still have to send."""
    while not reducer.poll(1):
        transport.wait(0)
        assert not list(transport.events())
    return reducer.recv_multipart()


def test_a_busy_link_keeps_another_ones_completion_waiting_for_moments(alone):
    flight, transport, reducers = alone
    long, short = (memoryview(bytearray(size)) for size in (500 * CHUNK, 8))
    for view, link in ((long, 0), (short, 1)):
        operation = Operation(view, DType.UINT8, ReduceOp.MAX, None, 1.0)
        operation.sequence = link
        flight.submit(operation, [LinkShard(link, 0, view.nbytes)], CHUNK, 0)
    transport.refill()
    for reducer, chunks in zip(reducers, (500, 1), strict=True):
        for _ in range(chunks):
            peer, frame, payload = receive(transport, reducer)
            header = Header.unpack(frame)._replace(
                type=M.RESULT, rank=0, watermark=0, since=0, history=0
            )
            reducer.send_multipart([peer, header.pack(), payload])
    done = []
    while len(done) < 2:
        transport.wait(5)
        done += [e for e in transport.events() if isinstance(e, Completed)]
    assert done == [[1], [0]]


def test_what_has_just_completed_is_there_when_a_link_is_reset(alone):
    """Else its results would never be claimed at another reducer, whose ranks wait for them."""
    flight, transport, (reducer, _) = alone
    operation = Operation(memoryview(bytearray(8)), DType.UINT8, ReduceOp.MAX, None, 1.0)
    operation.sequence = 0
    flight.submit(operation, [LinkShard(0, 0, 8)], CHUNK, 0)
    transport.refill()
    peer, frame, payload = receive(transport, reducer)
    header = Header.unpack(frame)._replace(type=M.RESULT, rank=0, since=0, history=0)
    reducer.send_multipart([peer, header.pack(), payload])
    transport.wait(5)  # it has come, and nobody has been told
    transport.reset(0)
    assert [chunk.done for chunk in flight.carried(0)] == [True]
    assert Completed([0]) in transport.events()
