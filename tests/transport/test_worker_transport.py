"""A client, its loop and its sockets, against reducers that do just what the test says."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hostile.zmtp import MORE, frame
from reducer.errors import ReducerLostError, RemoteProtocolError
from reducer.wire.constants import NO_SEQUENCE
from reducer.wire.header import Header
from tests import inside
from tests.engine.words import number
from tests.transport.scripted import CHUNK, MIB, M, Reducer, comes, meet, ramp
from tests.waits import eventually, within_s
from tests.worker_client.flights import opened
from worker_client.protocol._flight import CompiledFlight
from worker_client.runtime.transport import Transport


@pytest.mark.parametrize("nbytes", [0, 1, 1000, CHUNK, 3 * CHUNK + 5])
def test_a_buffer_goes_out_and_comes_back(joined, nbytes):
    client, (reducer,) = joined()
    for call in range(3):
        work = client.all_reduce(ramp(nbytes), op="max")
        sizes = [min(CHUNK, nbytes - at) for at in range(0, nbytes, CHUNK)] or [0]
        heard = reducer.hear_chunks(len(sizes))
        for at, size in enumerate(sizes):
            header = heard[at].header
            assert header == heard[0].header._replace(offset=CHUNK * at, nbytes=size)
            assert (heard[at].payload == ramp(nbytes)[CHUNK * at :][:size]).all()
        assert heard[0].header.sequence == heard[0].header.watermark == number(call)
        for at in reversed(heard):
            reducer.answer(at)
        assert (work.wait(20) == comes(ramp(nbytes))).all()


def test_the_window_is_kept_and_refilled(joined):
    client, (reducer,) = joined(window=4 * CHUNK)
    start = time.monotonic()
    work = client.all_reduce(ramp(60 * CHUNK), op="max")
    heard = reducer.hear_chunks(4)
    for done in range(60):
        if done == 7:
            assert reducer.hears_nothing()
        reducer.answer(heard.pop(0))
        if done < 56:
            heard.append(reducer.hear(M.CONTRIBUTION))
    assert (work.wait(20) == comes(ramp(60 * CHUNK))).all()
    within_s(5.0, start)  # not when the loop's own time-out comes


def test_a_call_wakes_the_loop_at_once(joined):
    client, (reducer,) = joined()
    start = time.monotonic()
    for _ in range(30):  # far fewer would take longer if each waited for the loop's own time-out
        work = client.all_reduce(ramp(8), op="max")
        reducer.serve(1)
        work.wait(5)
        time.sleep(0.005)  # so that the loop waits again
    within_s(3.0, start)


@pytest.fixture
def transport():
    """A transport without a client."""
    flight = CompiledFlight(Header(M.CONTRIBUTION))
    flight.add_link(MIB, retain=False)
    with contextlib.closing(Transport(flight)) as transport:
        yield transport


@pytest.fixture
def reducer():
    with contextlib.closing(Reducer()) as made:
        yield made


def read(transport):
    """Wait for a moment, and return what has happened."""
    transport.wait(0.1)
    return list(transport.events())


def test_what_was_not_sent_to_a_lost_reducer_is_sent_to_nobody(transport, reducer):
    transport.connect(reducer.address)
    meet(transport, reducer)
    reducer.close()
    time.sleep(0.2)
    transport.send(0, Header(M.GOODBYE).pack(), np.zeros(MIB, np.uint8).data)
    eventually(lambda: read(transport))
    again = Reducer(port=int(reducer.address.split(":")[1]))
    with contextlib.closing(again):
        meet(transport, again)
        assert again.hears_nothing(0.2)


def test_a_ping_without_news_stays_in_the_loop(joined, monkeypatch):
    client, (reducer,) = joined()
    session, heard = inside.flat(client).session, []
    receive = session.receive

    def note(link, frame, payload, now):
        heard.append(Header.unpack(frame).type)
        return receive(link, frame, payload, now)

    monkeypatch.setattr(session, "receive", note)
    work = client.all_reduce(ramp(8), op="max")
    for _ in range(5):
        reducer.say(Header(M.PING))
    reducer.serve(1)
    work.wait(5)
    assert heard == [M.PING], "the first one alone"


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
    ],
    ids=range(8),
)
def test_nonsense_fails_what_is_in_flight_and_nothing_later(joined, frames):
    client, (reducer,) = joined()
    data = ramp(8)
    work = client.all_reduce(data, op="max")
    reducer.hear(M.CONTRIBUTION)
    *others, last = frames
    reducer.send(b"".join(frame(one, MORE) for one in others) + frame(last))
    with pytest.raises(RemoteProtocolError):
        work.wait(5)
    assert (data == ramp(8)).all()
    reducer.welcome()  # over another connection
    assert reducer.hear(M.SHARD_MAP).header.sequence == NO_SEQUENCE
    abort = reducer.hear(M.ABORT).header
    assert (abort.sequence, abort.nbytes) == (0, number(0))
    work = client.all_reduce(ramp(8), op="max")
    reducer.serve(1)
    work.wait(5)


def test_the_last_results_of_a_reducer_that_goes_count(joined):
    client, (reducer,) = joined()
    work = client.all_reduce(ramp(4 * CHUNK), op="max")
    reducer.serve(4)
    time.sleep(0.2)  # libzmq drops what is still to be sent, or was not read, when it disconnects
    reducer.close()
    assert (work.wait(20) == comes(ramp(4 * CHUNK))).all()
    with pytest.raises(ReducerLostError):
        client.all_reduce(ramp(8), op="max").wait(5)


@contextlib.contextmanager
def connecting(address):
    """A transport that has been told to connect."""
    flight = opened(links=1, window=CHUNK)
    with contextlib.closing(Transport(flight)) as made:
        made.connect(address)
        yield made


def test_nothing_is_looked_for_while_a_name_is_being_resolved(monkeypatch):
    answered, look_up = threading.Event(), socket.getaddrinfo

    def slow(host, *arguments, **others):
        if host == "slow.pool" and not others.get("flags"):
            answered.wait(10)
        return look_up(host, *arguments, **others)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with connecting("slow.pool:1") as transport:
        transport.wait(0.0)
        start = time.monotonic()
        transport.wait(0.2)  # nobody wakes it
        assert time.monotonic() - start > 0.1
        answered.set()


def test_a_signal_ends_a_wait_at_once(reducer):
    """One that comes while the loop looks at its clock ends nothing: more of them are sent."""
    done, waits = threading.Event(), threading.get_ident()

    def interrupt():
        while not done.wait(0.03):
            signal.pthread_kill(waits, signal.SIGUSR1)

    with connecting(reducer.address) as transport, ThreadPoolExecutor(1) as threads:
        meet(transport, reducer)
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            sent = threads.submit(interrupt)
            start = time.monotonic()
            transport.wait(20)
            within_s(10.0, start)
        finally:
            done.set()
            sent.result()
            signal.signal(signal.SIGUSR1, before)


WITHOUT_FILES = """
import resource
from reducer.wire.header import Header
from worker_client.protocol._flight import CompiledFlight
from worker_client.runtime._loop import Loop
flight = CompiledFlight(Header(0))
resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
try:
    Loop(flight, 1.0)
except OSError as error:
    print(error)
"""


def test_without_files_there_is_no_loop():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[Errno 24] the loop cannot be set up\n"


def test_where_nobody_listens_it_tries_again_later_and_later(reducer):
    """A refused attempt is no connection that was lost, after which one is made at once."""
    reducer.close()
    with connecting(reducer.address) as transport:
        waits, until = 0, time.monotonic() + 1.0
        while time.monotonic() < until:
            transport.wait(0.1)
            waits += 1
            assert not list(transport.events())
        assert waits < 50  # some for each attempt
