"""What a worker and a reducer of one process say to each other, without a socket between them."""

import os
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from reducer import kernels
from reducer.engine import _slots
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.engine.limits import ConnectionLimits
from reducer.runtime import transport as reducer_transport
from reducer.runtime._loop import Loop
from reducer.runtime.guard import FAREWELL_S, Guard
from reducer.wire.constants import HEADER_BYTES, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from tests import inside
from tests.conftest import reducer_here
from tests.transport.scripted import MIB, ramp
from tests.waits import eventually, within_s
from worker_client.client import compose
from worker_client.config import WorkerConfig
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.lifecycle import FIRST_PLACE
from worker_client.protocol.operation import Operation
from worker_client.protocol.spec import JobSpec
from worker_client.runtime import transport as worker_transport
from worker_client.runtime.events import Connected, Disconnected, Message

pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
CHUNK = 8 << 10  # a reducer lets a stranger send as much


class Listener(Engine):
    """An engine that keeps what it hears, and says nothing."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.heard = []
        self.lost = []

    def receive(self, peer, header, payload, key="", **when):
        del when
        self.heard.append((peer, header, payload, key))
        return []

    def unreachable(self, peer):
        self.lost.append(peer)
        return []


class Ends:
    """Both ends of a pair; each moves on when it is told to."""

    def __init__(self, stack, engine=Listener):
        context = {}
        self.reducer = reducer_transport.Transport("tcp://127.0.0.1:0", context)
        stack.callback(self.reducer.close)
        identity = ReducerIdentity("1", "here:1")
        self.engine = engine(kernels.select(None), _slots, identity, memory_limit=MIB)
        self.guard = Guard(self.engine, self.reducer, ConnectionLimits(10, 1.0))
        self._loop = Loop(self.engine, self.reducer, self.guard)
        self.flight = CompiledFlight(Header(MessageType.HELLO))
        self.worker = worker_transport.Transport(self.flight, context)
        stack.enter_context(closing(self.worker))
        self.flight.add_link(1 << 30, retain=True)
        self.flight.open(0)
        self.worker.connect(self.reducer.inproc)
        self.news = []
        self.until(self.has_connected)

    def has_connected(self):
        return any(isinstance(event, Connected) for event in self.news)

    def hear(self):
        """Let the reducer read what there is."""
        self._loop.step(0.001)

    def until(self, holds):
        """Let both move on until something is so."""

        def step():
            self.hear()
            self.worker.wait(0.001)
            self.news += self.worker.events()
            return holds()

        eventually(step, 5.0)

    def submit(self, data, sequence):
        """Begin an all-reduce, of which all is queued at once."""
        operation = Operation(memoryview(data), DType.UINT8, ReduceOp.MAX, None, 1.0)
        operation.sequence = sequence
        self.flight.submit(operation, [LinkShard(0, 0, data.nbytes)], CHUNK, 0)
        self.worker.refill()
        return operation

    @property
    def payloads(self):
        """What the reducer has heard, in order."""
        return np.frombuffer(b"".join(payload for _, _, payload, _ in self.engine.heard), np.uint8)


@pytest.fixture
def ends():
    with ExitStack() as stack:
        yield Ends(stack)


def test_messages_of_any_size_come_back(ends):
    ends.worker.send(0, Header(MessageType.HELLO).pack(), b"hello")
    ends.until(lambda: bool(ends.engine.heard))
    ((peer, _, payload, key),) = ends.engine.heard
    assert (payload, key) == (b"hello", "inproc")
    for size in (0, 1, 1000, 100_000):
        said = ramp(size).tobytes()
        assert ends.reducer.send(peer, Header(MessageType.ERROR).pack(), said)
        ends.until(lambda size=size: len(getattr(ends.news[-1], "payload", b"-")) == size)
        assert ends.news[-1].payload == said


@pytest.mark.parametrize(("place", "nbytes"), [(FIRST_PLACE, 10 * CHUNK), (0, 100)])
def test_a_buffer_that_is_given_back_is_read_no_more(ends, place, nbytes):
    data = ramp(nbytes)
    operation = ends.submit(data, place)
    if place:  # of the rank's own question nobody says when it has ended
        ends.worker.detach(operation)
    data[:] = 255  # which `ramp` never is
    ends.until(lambda: ends.payloads.nbytes == nbytes)
    assert (ends.payloads == ramp(nbytes)).all()


def test_the_last_words_of_a_worker_are_heard(ends):
    ends.worker.send(0, Header(MessageType.GOODBYE).pack(), None)
    listens = threading.Thread(target=lambda: eventually(lambda: ends.hear() or ends.engine.heard))
    listens.start()
    ends.worker.close()
    listens.join(5)
    assert Header.unpack(ends.engine.heard[0][1]).type is MessageType.GOODBYE


def test_a_worker_hears_that_the_reducer_has_gone_and_finds_nobody(ends):
    ends.reducer.close()
    begun, looks = time.monotonic(), 0
    news = []
    while time.monotonic() < begun + 0.5:
        ends.worker.wait(0.1)
        news += ends.worker.events()
        looks += 1
    assert isinstance(news[0], Disconnected)
    assert not any(isinstance(event, Connected) for event in news)
    assert looks < 30, "it knocks again and again"


def test_who_was_dropped_is_hung_up_on():
    with ExitStack() as stack:
        ends = Ends(stack, Engine)
        ends.worker.send(0, bytes(HEADER_BYTES), None)
        ends.until(lambda: ends.engine.counters.dropped > 0)
        ends.guard.look(0.0)
        ends.until(lambda: any(isinstance(event, Message) for event in ends.news))
        ends.news.clear()
        ends.guard.look(FAREWELL_S + 0.1)
        ends.until(lambda: any(isinstance(event, Disconnected) for event in ends.news))


@pytest.mark.parametrize("together", [True, False])
def test_nobody_waits_for_who_ends_or_has_gone(ends, monkeypatch, together):
    ends.worker.send(0, Header(MessageType.HELLO).pack(), b"hello")
    ends.until(lambda: bool(ends.engine.heard))
    for transport in (reducer_transport, worker_transport):
        monkeypatch.setattr(transport, "LINGER_MS", 20_000)
    if not together:
        ends.reducer.close()
    ends.worker.send(0, Header(MessageType.ABORT).pack(), bytes(MIB))
    if together:
        ends.reducer.send(ends.engine.heard[0][0], Header(MessageType.ERROR).pack(), bytes(MIB))
    begun = time.monotonic()
    ending = threading.Thread(target=ends.worker.close)
    ending.start()
    ends.reducer.close()
    ending.join()
    within_s(10.0, begun)


def test_a_file_with_the_number_of_an_end_that_has_gone_is_not_written_to(ends):
    ends.hear()  # it has read everything, and sleeps
    ends.reducer.close()
    files = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(64)]
    try:
        ends.worker.send(0, Header(MessageType.ABORT).pack(), b"nobody")
        for file in files:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(file)
    finally:
        for file in files:
            os.close(file)


def held():
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("joins", [True, False])
def test_nothing_is_left_open(ends, joins):
    before = held()
    for _ in range(20):
        if joins:
            ends.worker.reset(0)
            ends.news.clear()
            ends.until(ends.has_connected)
        else:
            ends.reducer.meet()  # nobody joins that end
    eventually(lambda: ends.hear() or len(ends.engine.lost) == 20, 5.0)
    assert held() <= before + 2  # of 20; what else this process does may need one meanwhile


def test_an_end_is_joined_once(ends):
    met = ends.reducer.meet()
    loop = inside.loop(ends.worker)
    loop.join(0, met)
    with pytest.raises(ValueError, match="PyCapsule"):
        loop.join(0, met)


def test_a_worker_beside_its_reducer_takes_no_socket():
    with ExitStack() as stack:
        hosted = stack.enter_context(reducer_here())
        spec = JobSpec("job", 0, 0, 1, (hosted.address,), MIB, inproc=hosted.inproc)
        settings = WorkerConfig(timeout=5.0, connect_timeout=5.0)
        client = stack.enter_context(compose.client(settings, spec, server=hosted))
        data = np.ones(1000, np.float32)
        assert (client.all_reduce(data).wait(5) == 1).all()
        (lane,) = hosted.observer.status().lanes
        assert lane.connections == 0
