"""Connections that go on over other sockets, of which the test holds one end."""

import ctypes
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest

from hostile.lines import Bare
from hostile.zmtp import GREETING, MORE, frame
from reducer.engine.limits import Patience
from reducer.errors import MembershipError, ReducerLostError, ReductionTimeout
from reducer.wire.constants import RESUME_S, SHORTEST_PATIENCE_MS, Feature
from reducer.wire.header import Header
from reducer.wire.messages import Stream, Welcome, decode, decode_error, encode, encode_error
from tests import inside
from tests.transport import by_hand
from tests.transport.guarded import MIB, M, answer, ended, rounds
from tests.transport.scripted import CHUNK, HOST, ramp
from tests.waits import within_s
from worker_client.client.compose import Composer
from worker_client.protocol import joining
from worker_client.protocol.spec import JobSpec
from worker_client.runtime import implementation

pytest.importorskip("worker_client.runtime._loop", reason="needs the compiled loop")
FEATURES = int(Feature.STREAMS | Feature.RESUME)


@pytest.fixture
def impl():
    """The plain implementation cannot."""
    return "compiled"


# -- the reducer ------------------------------------------------------------------------------


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
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while connection.recv(1 << 16):
            pass
    connection.close()


class Resumed(Bare):
    """A connection over which another one goes on."""

    before = b""  # bytes of the broken connection, to be parsed first

    def _take(self, nbytes):
        found, self.before = self.before[:nbytes], self.before[nbytes:]
        return found + super()._take(nbytes - len(found))


def resume(post, worker, heard, number=0):
    line = post.meanwhile(lambda: Resumed(post.address))
    post.stack.enter_context(closing(line))
    line.say(Header(M.RESUME, offset=heard).pack(), encode(Stream(worker.ticket, number)))
    return line


def said_by(worker, sequence, payload):
    """Return the bytes of a contribution, which are not sent."""
    said = []
    line, worker.line = worker.line, type("Line", (), {"say": lambda _, *both: said.extend(both)})()
    worker.contribute(sequence, payload)
    worker.line = line
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
    header, _ = post.meanwhile(worker.hear)
    assert header.type is M.RESUME
    assert header.offset == broken.said, "all that was sent has come"
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
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.RESUME
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
        header, _ = post.meanwhile(stream.hear)
        assert Header.unpack(header).type is M.RESUME
    rounds(post)
    assert post.guard.connections == before
    assert len(post.engine.streams(post.engine.jobs[0].members[0].peer)) == 1


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
    line = post.meanwhile(lambda: Resumed(post.address))
    post.stack.enter_context(closing(line))
    broken.setblocking(False)
    with suppress(BlockingIOError):
        while broken.recv(1 << 16):
            pass
    broken.setblocking(True)
    line.say(Header(M.RESUME, offset=broken.heard).pack(), encode(Stream(worker.ticket, 0)))
    worker.contribute(1, bytes(60_000))
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).offset == broken.said


def test_nobody_is_too_silent_meanwhile(post):
    worker, other = two(post, patience_ms=SHORTEST_PATIENCE_MS)
    leave(post, worker.line.connection)
    until = time.monotonic() + 1.5 * SHORTEST_PATIENCE_MS / 1000
    while time.monotonic() < until:
        post.now = time.monotonic()
        other.say(other.common._replace(type=M.STRAGGLERS).pack())
        post.step()
    line = resume(post, worker, worker.line.connection.heard)
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.RESUME


@pytest.mark.parametrize("post", [Patience(max_connections=2, hello_s=10.0)], indirect=True)
def test_a_full_reducer_has_room_for_it(post):
    worker, _ = two(post)
    leave(post, worker.line.connection)
    line = resume(post, worker, worker.line.connection.heard)
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.RESUME


def test_who_did_not_ask_for_it_may_not(post):
    worker, _ = two(post, features=int(Feature.STREAMS))
    line = resume(post, worker, worker.line.connection.heard)
    assert isinstance(refusal(post, line), MembershipError)
    rounds(post)
    assert not ended(worker.line.connection)


def test_who_breaks_again_before_the_answer_may_try_again(post):
    worker, _ = two(post)
    leave(post, worker.line.connection)
    heard = worker.line.connection.heard
    for _ in range(3):
        abort(resume(post, worker, heard).connection.fileno())
        rounds(post)
    line = resume(post, worker, heard)
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.RESUME


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


def test_a_connection_that_has_not_broken_for_the_reducer(post):
    worker, _ = two(post)
    line = resume(post, worker, worker.line.connection.heard)
    header, _ = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.RESUME
    assert Header.unpack(header).offset == worker.line.connection.said
    post.until(lambda: ended(worker.line.connection))
    assert post.members == {"job": 2}


def test_a_stream_that_was_never_there(post):
    worker, _ = two(post)
    assert isinstance(refusal(post, resume(post, worker, 0, 3)), MembershipError)
    assert post.members == {"job": 2}


def refusal(post, line):
    header, body = post.meanwhile(line.hear)
    assert Header.unpack(header).type is M.ERROR
    return decode_error(body)


# -- the worker -------------------------------------------------------------------------------

COUNT = 4 * CHUNK
WHOLE = ramp(COUNT) + np.uint8(1)


class Reducer(by_hand.Reducer):
    """A reducer that counts what it says and hears over the connection at hand.

    Attributes:
        said, heard: bytes.
        before: bytes read before the connection broke, to be parsed first.
        attempts: RESUMEs that the worker has said.
    """

    said = heard = attempts = 0
    before = b""

    def __init__(self):
        super().__init__()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def read(self, nbytes):
        found, self.before = self.before[:nbytes], self.before[nbytes:]
        rest = super().read(nbytes - len(found))
        self.heard += len(rest)
        return found + rest

    def say(self, data):
        self.said += len(data)
        self.peer.sendall(data)

    def welcome(self):
        if self.peer is not None:
            self.peer.close()
        self.accept()
        self.said, self.heard = len(GREETING + by_hand.READY), 0
        self.hear_greeting()
        hello, _ = self.hear(M.HELLO)
        body = Welcome("1", ticket="a" * 32, features=FEATURES)
        self.say(by_hand.message(Header(M.WELCOME, window=hello.window), encode(body)))

    def break_(self):
        """Break the connection, with what this kernel has not handed out."""
        abort(self.peer.fileno())
        self.peer.close()

    def asked(self):
        """Accept another connection; return how many bytes the worker has read over the first."""
        counted, broken = (self.heard, self.before), self.peer
        self.before = b""
        self.accept()
        broken.close()
        self.hear_greeting()
        header, payload = self.hear(M.RESUME)
        self.attempts += 1
        said = decode(Stream, payload.tobytes())
        assert said == Stream("a" * 32, 0, attempt=self.attempts)
        self.heard, self.before = counted
        return header.offset

    def agree(self):
        self.peer.sendall(frame(Header(M.RESUME, offset=self.heard).pack()))

    def serve(self):
        """Answer all chunks of a buffer."""
        for _ in range(COUNT // CHUNK):
            header, payload = self.hear(M.CONTRIBUTION)
            self.say(by_hand.result(header, (payload + np.uint8(1)).tobytes()))


@pytest.fixture
def reducer():
    made = Reducer()
    yield made
    made.close()


@pytest.fixture
def client(reducer, monkeypatch):
    monkeypatch.setattr(joining, "FAR_S", 0.0)
    address = f"{HOST}:{reducer.listener.getsockname()[1]}"
    spec = JobSpec("job", 0, 0, 2, (address,), MIB, CHUNK, resumes=True)
    with ThreadPoolExecutor(1) as thread:
        composer = Composer(implementation.select("compiled"), 5.0, 5.0)
        made = thread.submit(composer.client, spec)
        reducer.welcome()
        client = made.result(5)
    with client:
        yield client


@pytest.mark.parametrize("cut", [1, 60, 100, 107, 5000, CHUNK // 2])
def test_what_a_reducer_did_not_get_is_sent_again(reducer, client, cut):
    work = client.all_reduce(ramp(COUNT), op="max")
    reducer.before = reducer.read(cut)
    for _ in range(3):
        reducer.break_()
        assert reducer.asked() == reducer.said
        reducer.agree()
    reducer.serve()
    assert (work.wait(5) == WHOLE).all()
    assert client.counters.losses == 0


@pytest.mark.parametrize("cut", [1, 60, 100, 107, 5000, CHUNK - 1])
def test_a_result_goes_on_in_its_middle(reducer, client, cut):
    work = client.all_reduce(ramp(COUNT), op="max")
    header, payload = reducer.hear(M.CONTRIBUTION)
    said = by_hand.result(header, (payload + np.uint8(1)).tobytes())
    reducer.say(said[:cut])
    reducer.peer.shutdown(socket.SHUT_WR)
    assert reducer.asked() == reducer.said
    reducer.agree()
    reducer.say(said[cut:])
    for _ in range(3):
        header, payload = reducer.hear(M.CONTRIBUTION)
        reducer.say(by_hand.result(header, (payload + np.uint8(1)).tobytes()))
    assert (work.wait(5) == WHOLE).all()


def test_nothing_is_done_while_no_answer_comes(reducer, client):
    work = client.all_reduce(ramp(COUNT), op="max")
    header, payload = reducer.hear(M.CONTRIBUTION)
    reducer.say(by_hand.result(header, (payload + np.uint8(1)).tobytes()))
    time.sleep(0.05)  # it waits for more
    reducer.break_()
    reducer.asked()
    before = time.process_time()
    time.sleep(RESUME_S / 2)
    assert time.process_time() - before < RESUME_S / 10
    reducer.agree()
    for _ in range(3):
        header, payload = reducer.hear(M.CONTRIBUTION)
        reducer.say(by_hand.result(header, (payload + np.uint8(1)).tobytes()))
    assert (work.wait(5) == WHOLE).all()


def test_what_the_caller_has_again_was_copied(reducer, client):
    data = ramp(COUNT)
    work = client.all_reduce(data, op="max", timeout="0.3s")
    reducer.before = reducer.read(500)
    reducer.break_()
    reducer.asked()
    with pytest.raises(ReductionTimeout):
        work.wait()
    data[:] = 7
    reducer.agree()
    heard = [reducer.hear(M.CONTRIBUTION)[1] for _ in range(COUNT // CHUNK)]
    assert (np.concatenate(heard) == ramp(COUNT)).all()


def lost(client, reducer, refuse):
    """Break a connection that cannot go on; return how long it takes until that is known."""
    work = client.all_reduce(ramp(COUNT), op="max")
    reducer.read(100)
    reducer.break_()
    start = time.monotonic()
    refuse()
    with pytest.raises(ReducerLostError):
        work.wait()
    return time.monotonic() - start


def test_a_reducer_that_is_no_more(reducer, client):
    assert lost(client, reducer, reducer.listener.close) < RESUME_S / 2


def test_a_reducer_that_does_not_know_the_link(reducer, client):
    def refuse():
        reducer.asked()
        body = encode_error(MembershipError("this reducer has no link with that ticket"))
        reducer.peer.sendall(by_hand.message(Header(M.ERROR), body))

    assert lost(client, reducer, refuse) < RESUME_S / 2
    reducer.welcome()


def test_a_reducer_that_has_not_all_bytes(reducer, client):
    def refuse():
        reducer.asked()
        reducer.heard += MIB  # more than was ever sent
        reducer.agree()

    assert lost(client, reducer, refuse) < RESUME_S / 2
    reducer.welcome()


def test_a_reducer_that_does_not_answer(reducer, client):
    assert RESUME_S <= lost(client, reducer, reducer.asked) < RESUME_S + 1


@pytest.mark.parametrize("steady", [False, True])
def test_another_attempt(reducer, client, steady):
    """Also while a caller's thread leads that looks at nothing else."""
    if steady:
        work = client.all_reduce(ramp(COUNT), op="max")
        reducer.serve()
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
        reducer.serve()
        assert (waits.result() == WHOLE).all()
