"""A reducer that did not run for a while: its machine was paused, or too busy to schedule it."""

import time
from contextlib import contextmanager

import pytest
import zmq

from reducer import config
from reducer.clock import MOST_S, ServingTime
from reducer.engine import engine
from reducer.server import Server
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode
from tests.waits import eventually

WAIT_S = 50.0
PAUSE_S = 60.0
PATIENCE_S = 20.0  # with strangers, and ranks that are away: far more than a busy machine needs
M = MessageType


def test_the_clock_stands_still_while_nobody_asks():
    read = [100.0]
    clock = ServingTime(lambda: read[0])
    assert clock.now() == 100.0
    for _ in range(8):
        read[0] += MOST_S / 2
        begun = clock.now()
    assert begun == 100.0 + 4 * MOST_S
    read[0] += PAUSE_S
    assert clock.now() == begun + MOST_S
    assert clock.paused_s() == PAUSE_S
    read[0] += MOST_S / 4
    assert clock.now() == begun + 1.25 * MOST_S
    for _ in range(8):
        read[0] += MOST_S / 2
        clock.now()
    assert clock.paused_s() == 0.0, "what happens now has another reason"


class Paused:
    """A reducer in this process, whose clock leaps when a test says so.

    Attributes:
        server: the reducer.
        leaps: seconds by which its clock is ahead.
    """

    def __init__(self, impl, context, monkeypatch):
        self.leaps = 0.0
        self._context = context
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self.leaps)
        monkeypatch.setattr(engine, "AWAY_S", PATIENCE_S)
        settings = config.load(
            bind="tcp://127.0.0.1:0", impl=impl, handshake_timeout=PATIENCE_S / 2
        )
        self.server = Server(settings)
        self.server.start()

    @contextmanager
    def peer(self):
        """Somebody who connects, and answers heartbeats."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{self.server.address}")
            yield socket

    def join(self, socket, rank):
        """Become a rank of a job of two."""
        body = encode(Hello("job", 2, 1, 0, process=f"process {rank}"))
        header = Header(M.HELLO, job=fingerprint("job"), rank=rank, window=1 << 16)
        socket.send_multipart([header.pack(), body])
        assert M.WELCOME in said(socket, M.WELCOME)

    def contribute(self, socket, rank):
        """Begin the job's first all-reduce, of nothing."""
        header = Header(M.CONTRIBUTION, job=fingerprint("job"), rank=rank, sequence=1)
        float32 = {"dtype": DType.FLOAT32, "wire_dtype": DType.FLOAT32, "op": ReduceOp.SUM}
        socket.send_multipart([header._replace(**float32).pack(), b""])
        eventually(lambda: self.server.counters.contributions == 1)

    @property
    def connections(self):
        (lane,) = self.server.observer.status().lanes
        return lane.connections

    def pause(self):
        """It does not run for a while, and then it does."""
        self.leaps += PAUSE_S
        time.sleep(0.3)  # some looks of the guard


def said(socket, last=None):
    """What a peer has heard but for PINGs, until it hears something, or by now."""
    heard = []
    while last not in heard and socket.poll(0 if last is None else WAIT_S * 1000):
        kind = Header.unpack(socket.recv_multipart()[0]).type
        heard += [] if kind is M.PING else [kind]
    return heard


@pytest.fixture
def paused(impl, context, monkeypatch):
    paused = Paused(impl, context, monkeypatch)
    yield paused
    paused.server.stop()


def test_who_has_just_come_may_still_say_who_it_is(paused):
    with paused.peer() as first, paused.peer() as second:
        eventually(lambda: paused.connections == 2)
        paused.pause()
        assert (paused.connections, paused.server.counters.closed) == (2, 0)
        for rank, socket in enumerate((first, second)):
            paused.join(socket, rank)


def test_a_rank_whose_connection_broke_may_still_come_back(paused):
    with paused.peer() as first:
        paused.join(first, 0)
        with paused.peer() as second:
            paused.join(second, 1)
        paused.contribute(first, 0)
        eventually(lambda: paused.connections == 1)
        paused.pause()
        assert said(first) == []
        with paused.peer() as second:
            paused.join(second, 1)
            assert said(first) == [], "nobody was lost"
            assert paused.server.counters.rounds_failed == 0
