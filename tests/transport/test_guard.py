"""The guard: real connections, a clock that the tests turn, and peers that break one rule each."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

from bench.intruder import Worker
from bench.zmtp import COMMAND, GREETING, HANDSHAKE, MORE, dial, frame
from reducer import guard as guards
from reducer import implementation, kernels, transport
from reducer.connections import Traffic
from reducer.engine import Engine
from reducer.guard import FAREWELL_S, STRANGERS_PER_LOOK, STUCK_LOOKS, Guard
from reducer.limits import Patience
from reducer.transport import Transport, make_context
from reducer.wire.constants import MessageType
from reducer.wire.messages import decode_error

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

WAIT_S = 60.0
PATIENCE = Patience(max_connections=1000, hello_s=10.0)
M = MessageType
MIB = 1 << 20


class Post:
    """A transport, an engine and a guard on duty, whose time is what a test says.

    Attributes:
        now: seconds.
        guard, engine, transport: those on duty.
    """

    def __init__(self, impl: str, patience: Patience, stack: ExitStack) -> None:
        self.now = 0.0
        table = kernels.select(None)
        chosen = implementation.select(impl, table)
        context = make_context(1)
        stack.callback(context.destroy, linger=0)
        self.transport = Transport("tcp://127.0.0.1:0", context)
        stack.callback(self.transport.close)
        self.engine = Engine(
            table, chosen.slots, memory_limit=256 * MIB, incarnation="1", address="here:1"
        )
        self.guard = Guard(self.engine, self.transport, patience)
        self._loop = chosen.loop(self.engine, self.transport)
        self._stack = stack
        self.address = f"127.0.0.1:{self.transport.port}"

    def step(self) -> None:
        """Serve for a moment, and let the guard look."""
        self._loop.step(0.005)
        self._loop.send(self.guard.look(self.now))

    def until(self, holds: Callable[[], bool]) -> None:
        """Go on until something is so."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "it never came to that"
            self.step()

    def stranger(self, *, greets: bool = True) -> socket.socket:
        """Connect, shake hands, and be known to the guard."""
        here = self.guard.connections
        peer = self._stack.enter_context(dial(self.address))
        if greets:
            peer.sendall(HANDSHAKE)
            received = b""
            while len(received) <= len(GREETING):  # and the READY after it
                received += peer.recv(1000)
        self.until(lambda: self.guard.connections == here + 1)
        return peer

    def member(self, job: str, **settings: int) -> Worker:
        """Join a job."""
        here = self.members.get(job, 0)
        worker = self._stack.enter_context(closing(Worker(self.address, job, **settings)))
        self.until(lambda: self.members.get(job, 0) > here)
        answer(worker, M.WELCOME)
        return worker

    @property
    def members(self) -> dict[str, int]:
        """Number of members by job."""
        return {job.name: len(job.members) for job in self.engine.jobs}

    @property
    def closed(self) -> int:
        """How many connections the guard has ended."""
        return self.engine.counters.closed


@pytest.fixture
def post(
    impl: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Post]:
    # Else libzmq closes connections that answer no heartbeats, and the guard need not.
    monkeypatch.setattr(transport, "heartbeats", lambda _: None)
    with ExitStack() as stack:
        yield Post(impl, getattr(request, "param", PATIENCE), stack)


def ended(peer: socket.socket) -> bool:
    """Whether the other side has hung up; what it said before is passed over."""
    peer.settimeout(0.001)
    try:
        return not peer.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True


def answer(worker: Worker, kind: MessageType) -> bytes:
    """Hear the next message but for PINGs, which is to be of this kind; return its body."""
    header, body = worker.hear()
    while header.type is M.PING:
        header, body = worker.hear()
    assert header.type is kind
    return body


def rounds(post: Post, number: int = 20) -> None:
    """Let some time pass in which nothing should happen."""
    for _ in range(number):
        post.step()


# -- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize("greets", [False, True])
def test_who_joins_no_job_in_time_is_shown_out(post: Post, *, greets: bool) -> None:
    peer = post.stranger(greets=greets)
    post.now = PATIENCE.hello_s
    rounds(post)
    assert not ended(peer)
    assert (post.closed, post.guard.connections) == (0, 1)
    post.now = PATIENCE.hello_s + 0.1
    post.until(lambda: ended(peer))
    assert (post.closed, post.guard.connections) == (1, 0)


def test_members_may_stay(post: Post) -> None:
    worker = post.member("job")
    post.now = 100 * PATIENCE.hello_s
    rounds(post)
    assert post.members == {"job": 1}
    assert post.closed == 0
    worker.contribute(0, bytes(2 * guards.STRANGER_BYTES))
    worker.say(worker.common._replace(type=M.GOODBYE).pack())
    post.until(lambda: post.members == {})
    rounds(post)
    worker.contribute(0, bytes(2 * guards.STRANGER_BYTES))  # this was under way
    rounds(post)
    assert post.closed == 0, "it has as much time again as somebody new"
    post.now += PATIENCE.hello_s + 0.1
    post.until(lambda: post.closed == 1)


def test_who_was_a_member_is_a_stranger(post: Post) -> None:
    worker = post.member("job", window=0)
    worker.say(worker.common._replace(type=M.GOODBYE).pack())
    post.until(lambda: post.members == {})
    post.step()
    with suppress(OSError):
        for chunk in range(4):
            worker.contribute(0, bytes(MIB), chunk * MIB)
    post.until(lambda: post.closed == 1)


def test_who_says_more_than_a_hello_is_shown_out(post: Post) -> None:
    modest, peer = post.stranger(), post.stranger()
    modest.sendall(frame(bytes(1 << 20))[: guards.STRANGER_BYTES // 2])
    peer.sendall(frame(bytes(1 << 20))[: 2 * guards.STRANGER_BYTES])
    post.until(lambda: ended(peer))
    rounds(post)
    assert not ended(modest)


def test_each_of_many_strangers_is_looked_at_in_turn(post: Post) -> None:
    peers = [post.stranger() for _ in range(2 * STRANGERS_PER_LOOK + 10)]
    for peer in peers:
        peer.sendall(frame(bytes(1 << 20))[: 2 * guards.STRANGER_BYTES])
    post.until(lambda: all(map(ended, peers)))


@pytest.mark.parametrize("post", [Patience(3, 10.0)], indirect=True)
def test_the_oldest_strangers_make_way(post: Post) -> None:
    post.member("job")
    peers = []
    for _ in range(4):
        post.now += 1
        peers.append(post.stranger() if len(peers) < 2 else dial(post.address))
    with peers[2], peers[3]:
        post.until(lambda: ended(peers[0]) and ended(peers[1]))
        rounds(post)
        assert not ended(peers[2])
        assert not ended(peers[3])
        assert post.members == {"job": 1}


@pytest.mark.parametrize("post", [Patience(2, 10.0)], indirect=True)
def test_a_job_is_not_pushed_out_by_later_ones(post: Post) -> None:
    workers = []
    for name in "ab":
        post.now += 1
        workers.append(post.member(name))
    post.now += 1
    with closing(Worker(post.address, "c")) as latest:
        deadline = time.monotonic() + WAIT_S
        while "c" not in post.members:  # it joins before the guard looks
            assert time.monotonic() < deadline
            post._loop.step(0.005)
        post.until(lambda: ended(latest.line.connection))
        rounds(post)
        assert not any(ended(worker.line.connection) for worker in workers)
        assert post.closed == 1


def test_the_guard_looks_more_often_while_there_is_reason(post: Post) -> None:
    rounds(post, 2)
    assert post.guard.wait_s == guards.LOOK_S
    peer = post.stranger()
    assert post.guard.wait_s == guards.LOOK_SOON_S
    peer.close()
    post.until(lambda: post.guard.wait_s == guards.LOOK_S)
    worker = post.member("job")
    post.until(lambda: post.guard.wait_s == guards.LOOK_S)
    worker.contribute(0, bytes(MIB))
    post.until(lambda: post.guard.wait_s == guards.LOOK_SOON_S)


# -- members ----------------------------------------------------------------------------------


def test_who_sends_beyond_its_window_is_dropped(post: Post) -> None:
    worker = post.member("job", window=MIB)
    (job,) = post.engine.jobs
    payload = bytes(1 << 18)
    for chunk in range(2 * job.reserved >> 18):
        post.step()
        try:
            worker.contribute(0, payload, chunk << 18)
        except OSError:
            break
    post.until(lambda: post.members == {})
    assert post.engine.counters.dropped == 1


def test_who_reads_no_results_is_dropped(post: Post) -> None:
    worker = post.member("job", world_size=1, window=MIB)
    post.member("other", world_size=1, window=MIB)
    payload, chunk = bytes(1 << 18), 0
    while "job" in post.members:  # the kernel holds megabytes before libzmq has to
        worker.contribute(0, payload, chunk << 18)
        chunk += 1
        assert chunk < 1000
        post.step()
    assert post.members == {"other": 1}


def test_what_is_in_slots_counts_as_well(post: Post) -> None:
    worker = post.member("job")
    post.member("job", rank=1)
    (job,) = post.engine.jobs
    worker.contribute(0, bytes(MIB))
    post.until(lambda: post.engine.held() > MIB // 2)
    job.reserved = post.engine.held() * 8 // 9  # the guard adds an eighth
    rounds(post)
    assert post.members == {"job": 2}
    worker.line.connection.sendall(frame(bytes(2 * MIB), MORE)[: MIB * 3 // 4])
    post.until(lambda: post.members == {"job": 1})
    assert job.members.keys() == {1}, "it is the other one's fault"


def test_what_waits_of_honest_members_is_no_offence(post: Post) -> None:
    worker = post.member("job", world_size=1, window=8 * MIB)

    def reduce() -> None:
        for chunk in range(60 + 4):  # so many are under way
            if chunk < 60:
                worker.contribute(0, bytes(MIB), chunk * MIB)
            if chunk >= 4:
                answer(worker, M.RESULT)

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    post.until(lambda: not thread.is_alive())
    assert post.members == {"job": 1}
    assert post.engine.counters.results == 60


def test_a_message_without_an_end_is_found_out(post: Post) -> None:
    worker = post.member("job", window=64 * MIB)
    worker.line.connection.sendall(frame(bytes(1 << 16), MORE) * 32)
    for _ in range(2 * STUCK_LOOKS):
        post.step()
    assert post.members == {"job": 1}
    post.now += guards.STUCK_S
    post.until(lambda: post.members == {})
    assert post.engine.counters.dropped == 1


def test_who_is_taken_from_is_not_stuck() -> None:
    connection = guards.Connection(0, (), 0.0)
    assert not any(connection.is_stuck(now, 3, float(now), much=True) for now in range(100))
    found = [
        connection.is_stuck(99, 3, float(at), much=much)
        for at, much in enumerate((True, False, True, True, True), 100)
    ]
    assert found == [False, False, False, False, True]


def test_looks_in_no_time_do_not_make_anybody_stuck() -> None:
    connection = guards.Connection(0, (), 0.0)
    times = [0.0] * 50 + [guards.STUCK_S / 2] * 50 + [guards.STUCK_S]
    assert [connection.is_stuck(0, 3, at, much=True) for at in times] == [False] * 100 + [True]


def test_a_connection_that_gets_the_descriptor_of_a_broken_one_is_another(post: Post) -> None:
    worker = post.member("job", world_size=1, window=8 * MIB)
    post.member("job 2")
    for chunk in range(20):
        worker.contribute(0, bytes(MIB), chunk * MIB)
        post.until(lambda number=chunk + 1: post.engine.counters.results == number)
        answer(worker, M.RESULT)
    descriptors = {c.descriptor for c in post.guard._connections.values()}
    worker.close()
    post.until(lambda: post.guard.connections == 1)
    peer = post.stranger()
    assert {c.descriptor for c in post.guard._connections.values()} == descriptors, "used again"
    rounds(post)
    assert post.members == {"job": 1, "job 2": 1}, "it may come back"
    assert not post.engine.counters.dropped
    peer.sendall(frame(bytes(1 << 20))[: 2 * guards.STRANGER_BYTES])
    post.until(lambda: ended(peer))


def test_what_a_broken_connection_had_said_is_not_the_next_ones(post: Post) -> None:
    post.member("first").close()
    post.until(lambda: post.guard.connections == 0)
    (first,) = post.transport._peers
    worker = post.member("second")
    ((number, connection),) = post.guard._connections.items()
    for late in (first, b"unheard of"):  # of the same descriptor, and read only now
        post.transport.note(late, connection.descriptor, 1000)
    assert post.transport.connection(first) != number
    post.transport.note(b"second's", connection.descriptor, 1000)
    assert post.transport.connection(b"second's") == number
    assert post.transport.connection(b"unheard of") == 0
    post.transport.note(b"unheard of", connection.descriptor, 1000)
    assert post.transport.connection(b"unheard of") == 0
    worker.close()


def test_heartbeats_that_were_not_sent_are_not_saved_up(post: Post) -> None:
    worker = post.member("job", window=MIB)
    (job,) = post.engine.jobs
    for _ in range(100):
        post.now += 24 * 3600.0
        post.step()
    worker.line.connection.settimeout(0.01)
    sent = 0
    with suppress(OSError):
        while post.members and sent < 8 * job.reserved:
            worker.line.connection.sendall(frame(bytes(1 << 16), MORE) * 4)
            sent += 1 << 18
            post.step()
    post.until(lambda: post.members == {})


def test_heartbeats_are_allowed_however_often_the_guard_looks() -> None:
    connection = guards.Connection(0, (), 0.0)
    for look in range(10_000):
        connection.weigh(Traffic(look // 2, 0), 0, 0, look / 1000)  # 500 bytes a second
    assert connection.unread <= 1


def test_what_libzmq_says_of_its_own_is_no_credit_for_results() -> None:
    connection = guards.Connection(0, (), 0.0)
    for at in range(100):  # the peer reads everything, and libzmq's heartbeats as well
        connection.weigh(Traffic(1000 * at, 1000 * at + 100 * at), 1000 * at, 1000 * at, float(at))
        assert (connection.unread, connection.unsent) == (0, 0)
    connection.weigh(Traffic(99_000, 108_900), 99_000, 99_000 + MIB, 100.0)
    assert connection.unsent == MIB


def test_members_of_many_jobs_have_their_turns(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MEMBERS_PER_LOOK", 2)
    for number in range(6):
        post.member(f"job {number}")
    looked = []
    weigh = guards.Connection.weigh

    def count(connection: guards.Connection, *arguments: object) -> None:
        looked.append(connection.descriptor)
        weigh(connection, *arguments)

    monkeypatch.setattr(guards.Connection, "weigh", count)
    rounds(post, 4)
    assert len(looked) <= 4 * 2
    rounds(post, 4)
    assert len(set(looked)) == 6


def test_a_long_message_may_take_its_time(post: Post) -> None:
    worker = post.member("job", window=64 * MIB)
    whole = frame(worker.common.pack(), MORE) + frame(bytes(MIB))
    worker.line.connection.sendall(whole[: MIB // 2])
    rounds(post, 2 * STUCK_LOOKS)
    assert post.members == {"job": 1}


@pytest.mark.parametrize("at_once", [False, True])
def test_heartbeats_count_only_if_they_are_too_many(post: Post, *, at_once: bool) -> None:
    worker = post.member("job")
    (job,) = post.engine.jobs
    job.reserved = 0
    ping = frame(b"\x04PING\0\0", COMMAND)
    number = 2 * guards.SLACK_BYTES // len(ping)
    for _ in range(100):
        if not at_once:
            post.now += number * len(ping) / guards.HEARTBEATS_PER_S / 100
        if post.members:
            worker.line.connection.settimeout(WAIT_S)
            worker.line.connection.sendall(ping * (number // 100))
            ended(worker.line.connection)  # takes the answers
            post.step()
    rounds(post)
    assert post.members == ({} if at_once else {"job": 1})


# -- those that were dropped ------------------------------------------------------------------


def test_who_was_dropped_may_read_why(post: Post) -> None:
    worker = post.member("job")
    worker.say(b"no header")
    post.until(lambda: post.members == {})
    assert "header" in str(decode_error(answer(worker, M.ERROR)))
    post.now += FAREWELL_S - 0.1
    rounds(post)
    assert not ended(worker.line.connection)
    post.now += 0.2
    post.until(lambda: ended(worker.line.connection))
    assert post.closed == 1


def test_who_was_dropped_and_goes_on_is_closed_at_once(post: Post) -> None:
    worker = post.member("job")
    worker.say(b"no header")
    post.until(lambda: post.members == {})
    worker.line.connection.sendall(frame(bytes(2 * guards.STRANGER_BYTES)))
    post.until(lambda: ended(worker.line.connection))


def test_nothing_is_remembered_of_who_has_gone(post: Post) -> None:
    worker = post.member("job")
    worker.contribute(0, bytes(64))
    post.stranger().close()
    worker.close()
    post.until(lambda: post.guard.connections == 0)
    post.until(lambda: post.members == {})
    rounds(post, transport.LATE_LOOKS + 1)
    assert not post.transport._peers
    assert not post.transport._owners
    assert not post.transport._open
