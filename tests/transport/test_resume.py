"""Connections that go on over other sockets, of which the test holds one end."""

import ctypes
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest

from hostile.lines import Bare
from hostile.zmtp import MORE, frame
from reducer.engine.limits import ConnectionLimits
from reducer.errors import MembershipError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import RESUME_S, SHORTEST_PEER_TIMEOUT_MS, Feature
from reducer.wire.header import Header
from reducer.wire.messages import Stream, decode, decode_error, encode, encode_error
from tests import inside
from tests.transport.guarded import MIB, M, answer, ended, rounds
from tests.transport.scripted import CHUNK, Reducer, comes, ramp, result
from tests.waits import within_s
from worker_client.protocol import joining

pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
FEATURES = int(Feature.STREAMS | Feature.RESUME)


class Counted(socket.socket):
    """A worker's end, whose bytes are counted both ways."""

    said = heard = receive_bytes = 0

    def sendall(self, data):
        self.said += len(data)
        super().sendall(data)

    def recv(self, nbytes):
        found = super().recv(nbytes)
        self.heard += len(found)
        return found


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Have workers that a test plays count."""

    def dial(address):
        host, _, port = address.rpartition(":")
        made = Counted()
        if made.receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, made.receive_bytes)
        made.connect((host, int(port)))
        return made

    monkeypatch.setattr("hostile.lines.dial", dial)


def two(post, **settings):
    settings = {"features": FEATURES, "window": MIB, **settings}
    return [post.member("job", rank=rank, **settings) for rank in range(2)]


def leave(post, connection):
    """End a connection, and hear all that the reducer has said before it noticed."""
    connection.shutdown(socket.SHUT_WR)
    rounds(post)
    drain(connection)
    connection.close()


class Resumed(Bare):
    """A connection over which another one goes on."""

    before = b""  # bytes of the broken connection, to be parsed first

    def _take(self, nbytes):
        found, self.before = self.before[:nbytes], self.before[nbytes:]
        return found + super()._take(nbytes - len(found))


def connect(post):
    line = post.meanwhile(lambda: Resumed(post.address))
    return post.stack.enter_context(closing(line))


def resume(post, worker, heard, number=0):
    line = connect(post)
    line.say(Header(M.RESUME, offset=heard).pack(), encode(Stream(worker.ticket, number)))
    return line


def agreed(post, line):
    """Hear that a connection goes on; return how many bytes of it the reducer has read."""
    header = Header.unpack(post.meanwhile(line.hear)[0])
    assert header.type is M.RESUME
    return header.offset


def drain(connection):
    """Read what has come, and do not wait."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while connection.recv(1 << 16):
            pass
    connection.setblocking(True)


def said_by(worker, sequence, payload):
    """Return the bytes of a contribution, which are not sent."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "say", lambda *both: said.extend(both))
        worker.contribute(sequence, payload)
    return frame(said[0], MORE) + frame(said[1])


@pytest.mark.parametrize("cut", [1, 60, 100, 107, 5000, 64 << 10])
def test_a_contribution_goes_on_in_its_middle(post, cut):
    worker, other = two(post)
    payload = np.arange(64 << 10, dtype=np.uint8) + np.uint8(3)
    said = said_by(worker, 1, payload.tobytes())
    broken = worker.line.connection
    broken.sendall(said[:cut])
    leave(post, broken)
    assert post.members == {"job": 2}
    worker.line = resume(post, worker, broken.heard)
    assert agreed(post, worker.line) == broken.said, "all that was sent has come"
    worker.line.connection.sendall(said[cut:])
    other.contribute(1, payload.tobytes())
    result = post.meanwhile(lambda: answer(worker, M.RESULT))
    assert (np.frombuffer(result, np.uint8) == payload * 2).all()
    post.until(lambda: post.guard.connections == 2)


def abort(descriptor):
    """Break a connection, and lose what its kernel has yet to send."""
    unspecified = ctypes.create_string_buffer(16)  # a struct sockaddr of AF_UNSPEC
    assert ctypes.CDLL(None).connect(descriptor, unspecified, len(unspecified)) == 0


def read_out(line):
    """Return all bytes that arrived over a connection before it broke, and close it."""
    found = b""
    with suppress(ConnectionError):
        while part := line.connection.recv(1 << 16):
            found += part
    line.close()
    return found


@pytest.mark.parametrize("missing", [0, 1, 1000])
def test_what_a_worker_did_not_get_is_sent_again(post, monkeypatch, missing):
    monkeypatch.setattr(Counted, "receive_bytes", 4096)
    worker, other = two(post)
    broken = worker.line.connection
    for each in (worker, other):
        each.contribute(1, bytes(range(256)) * 2048)
    post.until(lambda: post.engine.counters.results == 2)
    rounds(post)  # the kernels have what they take
    number = post.transport.connection(post.engine.jobs[0].members[0].peer)
    abort(inside.connections(post.guard)[number].line.descriptor)
    got = read_out(worker.line)
    assert len(got) < 512 << 10
    line = resume(post, worker, broken.heard - missing)
    agreed(post, line)
    line.before = got[: len(got) - missing]
    worker.line = line
    result = post.meanwhile(lambda: answer(worker, M.RESULT))
    assert result == bytes(2 * byte % 256 for byte in range(256)) * 2048


def test_what_nobody_has_any_more_ends_both(post):
    worker, _ = two(post)
    rounds(post)
    leave(post, worker.line.connection)
    line = resume(post, worker, 1)  # all was acknowledged, and this says that it was not read
    post.until(lambda: ended(line.connection))
    post.until(lambda: post.guard.connections == 1)


def test_it_is_the_broken_one_that_goes_on(post):
    """A stream goes on as such, and the reducer has as many connections as before."""
    worker, _ = two(post)
    stream = post.stream(worker)
    before = post.guard.connections
    for _ in range(3):
        leave(post, stream.connection)
        stream = resume(post, worker, stream.connection.heard, 1)
        agreed(post, stream)
    rounds(post)
    assert post.guard.connections == before
    assert len(post.engine.members.streams(post.engine.jobs[0].members[0].peer)) == 1


def test_results_go_over_the_streams_that_have_not_broken(post):
    workers = two(post)
    leave(post, post.stream(workers[0]).connection)
    for sequence in range(1, 5):
        for worker in workers:
            worker.contribute(sequence, bytes(64))
    start = time.monotonic()
    for _ in range(4):
        while post.meanwhile(lambda: workers[0].hear()[0].type) is M.PING:
            within_s(RESUME_S * 0.9, start, "one waits for another socket")


def test_what_has_come_is_read_first(post):
    """A part of it lies in the socket that broke when the reducer hears of another one."""
    worker, _ = two(post)
    broken = worker.line.connection
    line = connect(post)
    drain(broken)
    line.say(Header(M.RESUME, offset=broken.heard).pack(), encode(Stream(worker.ticket, 0)))
    worker.contribute(1, bytes(60_000))
    assert agreed(post, line) == broken.said


def test_nobody_is_too_silent_meanwhile(post):
    worker, other = two(post, patience_ms=SHORTEST_PEER_TIMEOUT_MS)
    leave(post, worker.line.connection)
    until = time.monotonic() + 1.5 * SHORTEST_PEER_TIMEOUT_MS / 1000
    while time.monotonic() < until:
        post.now = time.monotonic()
        other.say(other.common._replace(type=M.STRAGGLERS).pack())
        post.step()
    agreed(post, resume(post, worker, worker.line.connection.heard))


@pytest.mark.parametrize("post", [ConnectionLimits(max_connections=2, hello_s=10.0)], indirect=True)
def test_a_full_reducer_has_room_for_it_also_if_it_breaks_before_the_answer(post):
    worker, _ = two(post)
    leave(post, worker.line.connection)
    heard = worker.line.connection.heard
    for _ in range(3):
        abort(resume(post, worker, heard).connection.fileno())
        rounds(post)
    agreed(post, resume(post, worker, heard))


@pytest.mark.parametrize(("features", "number"), [(int(Feature.STREAMS), 0), (FEATURES, 3)])
def test_who_did_not_ask_for_it_may_not_and_no_stream_that_was_never_there(post, features, number):
    worker, _ = two(post, features=features)
    line = resume(post, worker, worker.line.connection.heard, number)
    assert isinstance(refusal(post, line), MembershipError)
    rounds(post)
    assert not ended(worker.line.connection)
    assert post.members == {"job": 2}


def test_who_does_not_come_back_is_gone(post):
    worker, _ = two(post)
    worker.close()
    start = time.monotonic()
    post.until(lambda: post.guard.connections == 1)
    assert RESUME_S <= time.monotonic() - start < RESUME_S + 1
    assert isinstance(refusal(post, resume(post, worker, 0)), MembershipError)


def test_who_joins_anew_is_not_waited_for(post):
    worker, _ = two(post)
    worker.close()
    rounds(post)
    start = time.monotonic()
    post.member("job", rank=0, features=FEATURES, window=MIB, came=2)
    within_s(RESUME_S / 2, start)


def refusal(post, line):
    header, body = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.ERROR
    return decode_error(body)


COUNT = 4 * CHUNK
WHOLE = comes(ramp(COUNT))


class Resuming(Reducer):
    """A reducer whose connections break and go on.

    Attributes:
        attempts: RESUMEs that the worker has said.
    """

    attempts = 0

    def __init__(self):
        super().__init__(receive_bytes=4096, features=FEATURES)

    def break_(self):
        """Break the connection, with what this kernel has not handed out."""
        abort(self.peer.fileno())
        self.peer.close()

    def asked(self):
        """Accept another connection; return how many bytes the worker has read over the first."""
        counted, broken = (self.said, self.heard, self.before), self.peer
        self.before = b""
        self.accept()
        broken.close()
        header, payload = self.hear(M.RESUME)
        self.attempts += 1
        said = decode(Stream, payload.tobytes())
        assert said == Stream("a" * 32, 0, attempt=self.attempts)
        self.said, self.heard, self.before = counted
        return header.offset

    def agree(self):
        self.peer.sendall(frame(Header(M.RESUME, offset=self.heard).pack()))


@pytest.fixture
def both(joined, monkeypatch):
    monkeypatch.setattr(joining, "FAR_S", 0.0)
    client, (reducer,) = joined(timeout_s=5.0, kind=Resuming, resumes=True)
    return client, reducer


@pytest.mark.parametrize("cut", [1, 60, 100, 107, 5000, CHUNK // 2])
def test_what_a_reducer_did_not_get_is_sent_again(both, cut):
    client, reducer = both
    work = client.all_reduce(ramp(COUNT), op="max")
    reducer.before = reducer.read(cut)
    for _ in range(3):
        reducer.break_()
        assert reducer.asked() == reducer.said
        reducer.agree()
    reducer.serve(4)
    assert (work.wait(5) == WHOLE).all()
    assert client.counters.losses == 0


@pytest.mark.parametrize("cut", [1, 60, 100, 107, 5000, CHUNK - 1])
def test_a_result_goes_on_in_its_middle(both, cut):
    client, reducer = both
    work = client.all_reduce(ramp(COUNT), op="max")
    said = result(reducer.hear(M.CONTRIBUTION))
    reducer.send(said[:cut])
    reducer.peer.shutdown(socket.SHUT_WR)
    assert reducer.asked() == reducer.said
    reducer.agree()
    reducer.send(said[cut:])
    reducer.serve(3)
    assert (work.wait(5) == WHOLE).all()


def test_nothing_is_done_while_no_answer_comes(both):
    client, reducer = both
    work = client.all_reduce(ramp(COUNT), op="max")
    reducer.serve(1)
    time.sleep(0.05)  # it waits for more
    reducer.break_()
    reducer.asked()
    before = time.process_time()
    time.sleep(RESUME_S / 2)
    assert time.process_time() - before < RESUME_S / 10
    reducer.agree()
    reducer.serve(3)
    assert (work.wait(5) == WHOLE).all()


def test_what_the_caller_has_again_was_copied(both):
    client, reducer = both
    data = ramp(COUNT)
    work = client.all_reduce(data, op="max", timeout="0.3s")
    reducer.before = reducer.read(500)
    reducer.break_()
    reducer.asked()
    with pytest.raises(ReductionTimeout):
        work.wait()
    data[:] = 7
    reducer.agree()
    heard = [heard.payload for heard in reducer.hear_chunks(4)]
    assert (np.concatenate(heard) == ramp(COUNT)).all()


def does_not_know_the_link(reducer):
    reducer.asked()
    body = encode_error(MembershipError("this reducer has no link with that ticket"))
    reducer.say(Header(M.ERROR), body)


def has_not_all_bytes(reducer):
    reducer.asked()
    reducer.heard += MIB  # more than was ever sent
    reducer.agree()


@pytest.mark.parametrize(
    ("refuse", "least", "most", "welcomes"),
    [
        (lambda reducer: reducer.listener.close(), 0.0, RESUME_S / 2, False),
        (does_not_know_the_link, 0.0, RESUME_S / 2, True),
        (has_not_all_bytes, 0.0, RESUME_S / 2, True),
        (Resuming.asked, RESUME_S, RESUME_S + 1, False),  # and does not answer
    ],
)
def test_a_reducer_with_which_it_cannot_go_on(both, refuse, least, most, welcomes):
    client, reducer = both
    work = client.all_reduce(ramp(COUNT), op="max")
    reducer.read(100)
    reducer.break_()
    start = time.monotonic()
    refuse(reducer)
    with pytest.raises(ReducerLostError):
        work.wait()
    assert least <= time.monotonic() - start < most
    if welcomes:
        reducer.welcome()


@pytest.mark.parametrize("steady", [False, True])
def test_another_attempt(both, steady):
    """Also while a caller's thread leads that looks at nothing else."""
    client, reducer = both
    if steady:
        work = client.all_reduce(ramp(COUNT), op="max")
        reducer.serve(4)
        work.wait(5)
    work = client.all_reduce(ramp(COUNT), op="max")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(work.wait, 5)
        reducer.before = reducer.read(100)
        reducer.break_()
        for _ in range(3):
            reducer.asked()
            reducer.peer.close()
        reducer.asked()
        reducer.agree()
        reducer.serve(4)
        assert (waits.result() == WHOLE).all()
