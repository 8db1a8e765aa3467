"""The poll tells of results when several have come, but waits for none that may not come."""

import fcntl
import select
import socket
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from reducer.wire.constants import HEADER_BYTES, DType, ReduceOp
from reducer.wire.header import Header
from tests.transport.scripted import CHUNK, M, Reducer, result
from tests.waits import eventually
from tests.worker_client.flights import opened, submit
from worker_client.protocol.flight import LinkShard
from worker_client.protocol.operation import Operation

_loop = pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
IN_FLIGHT = 6  # chunks, and results for half of them are awaited


class Worker:
    """A loop over one connection, and the other end of that."""

    def __init__(self, reducer):
        self._reducer = reducer
        self._flight = opened(links=1, window=IN_FLIGHT * (CHUNK + 8 * HEADER_BYTES))
        self._loop = _loop.Loop(self._flight, 3600.0)
        self._core = _loop.Core(self._flight, self._loop)
        self._loop.add(0)
        self._socket = socket.create_connection(reducer.listener.getsockname())
        self._socket.setblocking(False)
        self._loop.open(0, self._socket.fileno(), None)
        with ThreadPoolExecutor(1) as thread:
            accepted = thread.submit(reducer.accept)
            while not self._loop.connected(0):
                self._core.run(1.0)
                while self._loop.change() is not None:
                    continue
            accepted.result()

    def close(self):
        self._loop.end(0)
        self._socket.close()

    def submit(self, *calls):
        """Make calls of so many chunks; return the contributions that the window has room for."""
        for chunks in calls:
            data = bytearray(chunks * CHUNK)
            mine = Operation(memoryview(data), DType.UINT8, ReduceOp.MAX, None, 10.0)
            submit(self._flight, mine, [LinkShard(0, 0, len(data))], CHUNK, 0)
        self._loop.refill()
        self._core.run(0.0)
        return self._reducer.hear_chunks(IN_FLIGHT)

    def hear(self, *contributions):
        """Whether the poll tells of the results of these, once they have all come."""
        said = b"".join(map(result, contributions))
        come = unread(self._socket) + len(said)
        self._reducer.send(said)
        eventually(lambda: unread(self._socket) == come)
        return self.readable

    @property
    def readable(self):
        """Whether the poll tells of the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def take(self, contribution):
        """Read its result, and wait for others."""
        header = contribution.header
        while self._flight.expects(0, header.sequence, header.offset):
            self._core.run(0.001)
            self._core.news()

    def fail(self, contribution):
        """End its all-reduce before all of the results have come."""
        self._loop.detach(contribution.header.sequence)
        self._flight.end(contribution.header.sequence)

    def hear_an_error(self):
        """Have the reducer send one; return the message."""
        self._reducer.say(Header(M.ERROR), b"{}")
        heard = []

        def comes():
            self._core.run(1.0)
            heard[:] = [self._core.news()[1]]
            return heard != [None]

        eventually(comes, 1.0)
        return heard[0]


def unread(connection):
    """Return how many received bytes of a connection wait in the kernel."""
    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.fixture
def worker():
    with closing(Reducer()) as reducer, closing(Worker(reducer)) as made:
        yield made


@pytest.mark.parametrize(
    ("submitted", "told"),
    [
        ([40], [False, False, True]),  # several of a long buffer at once
        ([3, 40], [True]),  # the last ones of a call wait for none of the next
        ([IN_FLIGHT], [True]),  # of a short buffer each
    ],
)
def test_with_which_result_the_poll_tells_of_them(worker, submitted, told):
    first, *others = worker.submit(*submitted)
    assert worker.hear(first)
    worker.take(first)
    assert [worker.hear(other) for other, _ in zip(others, told, strict=False)] == told


def test_a_short_message_waits_for_no_results_for_ever(worker):
    first, second, *_ = worker.submit(40)
    assert worker.hear(first)
    worker.take(first)
    assert worker.hear_an_error()
    worker.hear(second)
    worker.take(second)
    assert worker.hear_an_error(), "also the second time"


def test_results_of_a_call_that_has_failed_are_awaited_no_more(worker):
    first, second, *_ = worker.submit(40)
    assert worker.hear(first)
    worker.take(first)
    assert not worker.hear(second)
    worker.fail(first)
    assert worker.readable
