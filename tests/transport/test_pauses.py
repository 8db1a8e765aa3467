"""A reducer that did not run for a while: its machine was paused, or too busy to schedule it."""

import time
from contextlib import closing

import pytest

from hostile.intruder import LARGEST_CHUNK, WINDOW, Worker
from hostile.lines import Bare
from reducer.clock import MOST_S, ServingTime
from reducer.engine import engine
from reducer.wire.constants import LONGEST_PEER_TIMEOUT_MS, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Hello, encode
from tests.conftest import reducer_here
from tests.transport.guarded import answer
from tests.waits import eventually

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

    leaps = 0.0

    def join(self, rank):
        """Become a rank of a job of two, which says nothing by itself."""
        worker = Worker(self.server.address, "job", rank, patience_ms=LONGEST_PEER_TIMEOUT_MS)
        answer(worker, M.WELCOME)
        return closing(worker)

    @property
    def connections(self):
        (lane,) = self.server.observer.status().lanes
        return lane.connections

    def pause(self):
        """It does not run for a while, and then it does."""
        self.leaps += PAUSE_S
        time.sleep(0.3)  # some looks of the guard


@pytest.fixture
def paused(monkeypatch):
    monotonic = time.monotonic
    monkeypatch.setattr(engine, "UNREACHABLE_S", PATIENCE_S)
    paused = Paused()
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + paused.leaps)
    with reducer_here(handshake_timeout=PATIENCE_S / 2) as paused.server:
        yield paused


def hears_nothing(worker):
    """Whether a worker has heard nothing but PINGs."""
    worker.line.connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        answer(worker, None)
    return True


def test_a_pause_counts_for_nobody(paused):
    with paused.join(0) as first:
        with paused.join(1):
            first.contribute(1, bytes(64))
            eventually(lambda: paused.server.counters.contributions == 1)
        eventually(lambda: paused.connections == 1)
        with closing(Bare(paused.server.address)) as line:
            eventually(lambda: paused.connections == 2)
            paused.pause()
            assert (paused.connections, paused.server.counters.closed) == (2, 0)
            assert hears_nothing(first)
            # A stranger may still say who it is, and a rank come back.
            patient = {"chunk_bytes": LARGEST_CHUNK, "patience_ms": LONGEST_PEER_TIMEOUT_MS}
            hello = Hello("job", 2, 1, 0, **patient)
            line.say(first.common._replace(rank=1, window=WINDOW).pack(), encode(hello))
            assert Header.unpack(line.hear()[0]).type is M.WELCOME
            assert hears_nothing(first), "nobody was lost"
            assert paused.server.counters.rounds_failed == 0
