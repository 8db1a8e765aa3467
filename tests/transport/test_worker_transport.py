"""A client, its loop and its sockets, against reducers that do just what the test says."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import zmq

from reducer.errors import (
    LocalProtocolError,
    ReducerLostError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode, encode_error
from worker_client import implementation
from worker_client.client import Client
from worker_client.flight import Part
from worker_client.operation import Operation
from worker_client.settings import Settings
from worker_client.transport import Completed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker_client._flight import CompiledFlight
    from worker_client.transport import Transport
    from worker_client.work import Work

M = MessageType
CHUNK = 64 << 10
MIB = 1 << 20


class Heard(NamedTuple):
    """A message that reached a reducer; `payload` is None in one of a single frame."""

    header: Header
    payload: np.ndarray | None


class Reducer:
    """A ROUTER socket that knows one worker and says what it is told to."""

    def __init__(self, context: zmq.Context, receive_limit: int = 0) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        if receive_limit:
            self.socket.rcvhwm = 1
            self.socket.rcvbuf = receive_limit
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.worker = b""

    def hear(self, kind: MessageType, within_s: float = 5.0) -> Heard:
        assert self.socket.poll(int(within_s * 1000)), f"no {kind.name} came"
        self.worker, *frames = self.socket.recv_multipart()
        header = Header.unpack(frames[0])
        assert header.type is kind
        return Heard(header, np.frombuffer(frames[1], np.uint8) if len(frames) > 1 else None)

    def hears_nothing(self, for_s: float = 0.1) -> bool:
        return not self.socket.poll(int(for_s * 1000))

    def say(self, *frames: bytes | np.ndarray) -> None:
        self.socket.send_multipart([self.worker, *frames])

    def welcome(self) -> None:
        hello = self.hear(M.HELLO)
        answer = Header(M.WELCOME, window=hello.header.window)
        self.say(answer.pack(), encode(Welcome(incarnation="1")))

    def answer(self, heard: Heard, **change: Any) -> None:
        """Say what comes out: every byte of the contribution plus one."""
        header = heard.header._replace(type=M.RESULT, rank=0, watermark=0)
        payload = change.pop("payload", heard.payload + np.uint8(1))
        self.say(header._replace(**change).pack(), payload)

    def fail(self, sequence: int) -> None:
        body = encode_error(ReductionTimeout("too late", missing=(1,)))
        self.say(Header(M.ERROR, sequence=sequence).pack(), body)


@pytest.fixture(params=["plain", "compiled"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def joined(
    impl: str, context: zmq.Context
) -> Iterator[Callable[..., tuple[Client, list[Reducer]]]]:
    """Make a client of rank 0 of 2 that has joined some reducers."""
    with contextlib.ExitStack() as stack:

        def make(
            reducers: int = 1, window: int = MIB, timeout_s: float = 10.0, receive_limit: int = 0
        ) -> tuple[Client, list[Reducer]]:
            pool = [Reducer(context, receive_limit) for _ in range(reducers)]
            for reducer in pool:
                stack.callback(reducer.socket.close)
            addresses = tuple(f"127.0.0.1:{reducer.port}" for reducer in pool)
            settings = Settings("job", 0, 0, 2, addresses, window, CHUNK)
            with ThreadPoolExecutor(1) as thread:
                client = thread.submit(
                    Client, settings, timeout_s=timeout_s, connect_timeout_s=5.0, impl=impl
                )
                for reducer in pool:
                    reducer.welcome()
                made = stack.enter_context(client.result(5))
            assert made.impl == impl
            return made, pool

        yield make


def ramp(nbytes: int) -> np.ndarray:
    """Bytes that say where they come from."""
    return (np.arange(nbytes, dtype=np.uint32) % 251).astype(np.uint8)


# -- what is healthy ------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 1000, CHUNK, 3 * CHUNK + 5])
def test_a_buffer_goes_out_and_comes_back(joined: Callable, nbytes: int) -> None:
    client, (reducer,) = joined()
    for sequence in range(3):
        data = ramp(nbytes)
        work = client.all_reduce(data, op="max", name="it")
        sizes = [min(CHUNK, nbytes - at) for at in range(0, nbytes, CHUNK)] or [0]
        heard = [reducer.hear(M.CONTRIBUTION) for _ in sizes]
        for at, size in enumerate(sizes):
            header = heard[at].header
            assert header == heard[0].header._replace(offset=CHUNK * at, nbytes=size)
            assert (heard[at].payload == ramp(nbytes)[CHUNK * at :][:size]).all()
        assert heard[0].header.sequence == heard[0].header.watermark == sequence
        for at in reversed(heard):
            reducer.answer(at)
        assert (work.wait(5) == ramp(nbytes) + np.uint8(1)).all()


def test_the_window_is_kept_and_refilled(joined: Callable) -> None:
    client, (reducer,) = joined(window=4 * CHUNK)
    start = time.monotonic()
    work = client.all_reduce(ramp(60 * CHUNK), op="max")
    heard = [reducer.hear(M.CONTRIBUTION) for _ in range(4)]
    for done in range(60):
        if done == 7:
            assert reducer.hears_nothing()
        reducer.answer(heard.pop(0))
        if done < 56:
            heard.append(reducer.hear(M.CONTRIBUTION))
    assert (work.wait(5) == ramp(60 * CHUNK) + np.uint8(1)).all()
    assert time.monotonic() - start < 5.0  # not when the loop's own time-out comes


def test_several_at_once_end_in_any_order(joined: Callable) -> None:
    client, (reducer,) = joined()
    works = [client.all_reduce(ramp(100 + size), op="max") for size in range(10)]
    heard = [reducer.hear(M.CONTRIBUTION) for _ in works]
    for at in (3, 9, 0, 1, 2, 8, 7, 4, 6, 5):
        reducer.answer(heard[at])
        assert (works[at].wait(5) == ramp(100 + at) + np.uint8(1)).all()
    client.all_reduce(ramp(1), op="max")
    assert reducer.hear(M.CONTRIBUTION).header.watermark == 10


def test_all_reducers_have_work_at_once(joined: Callable) -> None:
    client, pool = joined(reducers=3, window=3 * 2 * CHUNK)
    work = client.all_reduce(ramp(12 * CHUNK), op="max")
    for _ in range(4):
        for reducer in pool:
            reducer.answer(reducer.hear(M.CONTRIBUTION))
    assert (work.wait(5) == ramp(12 * CHUNK) + np.uint8(1)).all()


def test_a_call_wakes_the_loop_at_once(joined: Callable) -> None:
    client, (reducer,) = joined()
    start = time.monotonic()
    for _ in range(30):  # far fewer would take longer if each waited for the loop's own time-out
        work = client.all_reduce(ramp(8), op="max")
        reducer.answer(reducer.hear(M.CONTRIBUTION))
        work.wait(5)
        time.sleep(0.005)  # so that the loop waits again
    assert time.monotonic() - start < 3.0


def test_calls_of_many_threads_all_wake_it(joined: Callable) -> None:
    client, (reducer,) = joined(window=64 * MIB)
    works: list = []

    def call() -> None:
        works.extend(client.all_reduce(ramp(8), op="max") for _ in range(200))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    for _ in range(800):
        reducer.answer(reducer.hear(M.CONTRIBUTION))
    for thread in threads:
        thread.join()
    assert all((work.wait(5) == ramp(8) + np.uint8(1)).all() for work in works)
    assert time.monotonic() - start < 10.0


# -- what is not ----------------------------------------------------------------------------------


def test_what_is_no_result_is_dealt_with_in_order(joined: Callable) -> None:
    client, (reducer,) = joined()
    data = ramp(2 * CHUNK)
    good, bad = client.all_reduce(ramp(8), op="max"), client.all_reduce(data, op="max")
    first, *others = (reducer.hear(M.CONTRIBUTION) for _ in range(3))
    reducer.answer(first)
    reducer.fail(0)  # too late: it has ended well
    reducer.say(Header(M.PING).pack())
    reducer.fail(1)
    for heard in others:
        reducer.answer(heard)  # too late
    assert (good.wait(5) == ramp(8) + np.uint8(1)).all()
    with pytest.raises(ReductionTimeout, match="too late"):
        bad.wait(5)
    again = client.all_reduce(ramp(8), op="max")
    reducer.answer(reducer.hear(M.CONTRIBUTION))
    again.wait(5)
    assert (data == ramp(2 * CHUNK)).all()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"RDSV"],
        [bytes(96)],
        [Header(M.RESULT).pack()],
        [Header(M.RESULT).pack(), b"x"],
        [Header(M.RESULT).pack(), b"x", b"y"],
        [Header(M.PING).pack(), b"", b"", b"", b""],
        [Header(M.HELLO).pack(), b"{}"],
        [Header(M.WELCOME).pack(), b"{}"],
    ],
    ids=range(9),
)
def test_nonsense_fails_what_is_in_flight_and_nothing_later(
    joined: Callable, frames: list[bytes]
) -> None:
    client, (reducer,) = joined()
    work = client.all_reduce(ramp(8), op="max")
    reducer.hear(M.CONTRIBUTION)
    reducer.say(*frames)
    with pytest.raises(RemoteProtocolError):
        work.wait(5)
    assert reducer.hear(M.ABORT).header.sequence == 0
    work = client.all_reduce(ramp(8), op="max")
    reducer.answer(reducer.hear(M.CONTRIBUTION))
    work.wait(5)


@pytest.mark.parametrize("change", [{"op": 1}, {"payload": b"x" * 7}, {"total_bytes": 16}])
def test_a_result_that_does_not_fit_is_an_error(joined: Callable, change: dict) -> None:
    client, (reducer,) = joined()
    data = ramp(8)
    work = client.all_reduce(data, op="max")
    reducer.answer(reducer.hear(M.CONTRIBUTION), **change)
    with pytest.raises(RemoteProtocolError):
        work.wait(5)
    assert (data == ramp(8)).all()


def test_one_that_talks_without_end_keeps_nobody_waiting(joined: Callable) -> None:
    client, (talker, quiet) = joined(reducers=2)
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                talker.socket.send_multipart([talker.worker, Header(M.PING).pack()], zmq.NOBLOCK)

    thread = threading.Thread(target=talk)
    try:
        first = talker.worker
        works = [client.all_reduce(ramp(2 * CHUNK), op="max", timeout=30) for _ in range(5)]
        kept = [talker.hear(M.CONTRIBUTION) for _ in works]
        assert talker.worker == first
        for heard in kept:
            talker.answer(heard)
        thread.start()
        for work in works:
            quiet.answer(quiet.hear(M.CONTRIBUTION))
            assert (work.wait(5) == ramp(2 * CHUNK) + np.uint8(1)).all()
    finally:
        stop.set()
        if thread.ident:
            thread.join()


def test_the_last_results_of_a_reducer_that_goes_count(joined: Callable) -> None:
    client, (reducer,) = joined()
    work = client.all_reduce(ramp(4 * CHUNK), op="max")
    for _ in range(4):
        reducer.answer(reducer.hear(M.CONTRIBUTION))
    time.sleep(0.2)  # libzmq drops what is still to be sent, or was not read, when it disconnects
    reducer.socket.close()
    assert (work.wait(5) == ramp(4 * CHUNK) + np.uint8(1)).all()
    with pytest.raises(ReducerLostError):
        client.all_reduce(ramp(8), op="max").wait(5)


# -- whose memory it is ---------------------------------------------------------------------------


class Stalled(NamedTuple):
    """An all-reduce whose messages lie in its buffer, because the reducer reads nothing."""

    data: np.ndarray
    work: Work
    ended: threading.Event


@pytest.fixture
def stalled(joined: Callable) -> tuple[Client, Reducer, Stalled]:
    """A client, a reducer that does not read, and an all-reduce that cannot leave."""
    client, (reducer,) = joined(window=64 * MIB, receive_limit=1 << 16)
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
    reducer.fail(0)
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
        flight.add_link(1 << 30)
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
        flight.submit(operation, [Part(link, 0, view.nbytes)], CHUNK)
    transport.refill()
    for reducer, chunks in zip(reducers, (500, 1), strict=True):
        for _ in range(chunks):
            peer, frame, payload = reducer.recv_multipart(zmq.NOBLOCK)
            header = Header.unpack(frame)._replace(type=M.RESULT, rank=0, watermark=0)
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
    for _ in range(2):
        address = np.frombuffer(data, np.uint8).ctypes.data
        mine = Operation(memoryview(data), DType.UINT8, ReduceOp.MAX, None, 1.0)
        mine.sequence = flight.submit(mine, [Part(0, 0, nbytes)], nbytes)
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
