"""Today's reducer and workers understand what those of 0.1.0 have said (`golden/README.md`)."""

import socket
import struct
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reducer.errors import MismatchError
from reducer.wire.constants import MAX_CHUNK_BYTES, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, decode, decode_error
from tests.engine.twins import IMPLEMENTATIONS, Served
from tests.wire.golden.sessions import SESSIONS
from tests.zmtp._zmtp import Zmtp
from worker_client.client.bootstrap import connect

FOLDER = Path(__file__).with_name("golden")
M = MessageType


def records(name):
    """Yield what a file has: the connection, whether a worker says it, the bytes."""
    data = (FOLDER / f"{name}.wire").read_bytes()
    at = 0
    while at < len(data):
        number, up, nbytes = struct.unpack_from("<BBI", data, at)
        at += 6 + nbytes
        yield number, up, data[at - nbytes : at]


class Decoder:
    """Takes messages from the bytes of one end of a connection."""

    def __init__(self, worker):
        self._zmtp = Zmtp(bool(worker), None, MAX_CHUNK_BYTES + 96)

    def take(self, data):
        """Return headers and bodies."""
        events = self._zmtp.take(data)
        self._zmtp.reply()
        assert {kind for kind, *_ in events} <= {"ready", "message"}
        frames = [rest[0] for kind, *rest in events if kind == "message"]
        return [(Header.unpack(first), b"".join(rest)) for first, *rest in frames]


def said(header, body):
    """What a reducer's message says, whatever reducer it is and when it says it."""
    if header.type is M.WELCOME:
        welcome = decode(Welcome, body)
        return header.type, header.job, header.rank, welcome.version.partition(".")[0]
    if header.type is M.ERROR:
        error = decode_error(body)
        return header.type, header.sequence, type(error).__name__, sorted(vars(error).items())
    return header._replace(watermark=0, since=0, window=0), body


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SESSIONS)
def test_a_reducer_hears_workers_of_0_1_0(name, implementation):
    served = Served(implementation, address="here:1")
    decoders = {(number, up): Decoder(up) for number in range(4) for up in range(2)}
    then, now = defaultdict(list), defaultdict(list)
    for number, up, data in records(name):
        for header, body in decoders[number, up].take(data):
            if not up:
                then[number].append(said(header, body))
                continue
            for send in served.receive(b"%d" % number, header.pack(), body):
                answer = (
                    Header.unpack(send.header),
                    b"" if send.payload is None else bytes(send.payload),
                )
                now[int(send.peer)].append(said(*answer))
    assert {number: sorted(map(str, its)) for number, its in now.items()} == {
        number: sorted(map(str, its)) for number, its in then.items()
    }
    assert not served.engine.jobs, "all have left"


def say_again(listener, spoken):
    """Say what a reducer has said, each as soon as the worker has said as much as then.

    Returns:
        What the worker contributes now, and what it contributed then.
    """
    connection, _ = listener.accept()
    decoders = Decoder(True), Decoder(True)
    now, then = [], []
    with connection:
        connection.settimeout(20)
        for up, data in spoken:
            if up:
                then += decoders[1].take(data)
                continue
            while len(now) < len(then):
                heard = connection.recv(1 << 16)
                assert heard, "the worker has hung up"
                now += decoders[0].take(heard)
            connection.sendall(data)
        while heard := connection.recv(1 << 16):
            now += decoders[0].take(heard)
    return contributed(now), contributed(then)


def contributed(messages):
    """Return the bytes of each all-reduce, however they were cut, with its type and operation."""
    parts = sorted(
        (header.sequence, header.dtype, header.op, header.offset, body)
        for header, body in messages
        if header.type is M.CONTRIBUTION
    )
    whole = defaultdict(bytes)
    for *operation, _, body in parts:
        whole[tuple(operation)] += body
    return whole


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", sorted(SESSIONS.keys() - {"names"}))  # their order is chance
def test_a_worker_hears_the_reducer_of_0_1_0(name, rank):
    spoken = defaultdict(list)
    for number, up, data in records(name):
        spoken[number].append((up, data))
    (mine,) = (
        its
        for its in spoken.values()
        if Decoder(True).take(b"".join(data for up, data in its if up))[0][0].rank == rank
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        replay = pool.submit(say_again, listener, mine)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with connect(rank=rank, world_size=2, servers=address, job="golden") as client:
            for call in SESSIONS[name]:
                if call.apart:
                    with pytest.raises(MismatchError, match="rank 0 says 132, rank 1 says 136"):
                        call.begin(client).wait(20)
                else:
                    assert call.begin(client).wait(20).tobytes() == call.right().tobytes()
        now, then = replay.result(20)
        assert now == then != {}
