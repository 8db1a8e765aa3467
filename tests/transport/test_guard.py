"""The guard: real connections, a clock that the tests turn, and strangers that break rules."""

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import psutil
import pytest

from hostile.intruder import Worker
from hostile.zmtp import LONG, MORE, dial, frame
from reducer import tcp_connections
from reducer.engine.limits import ConnectionLimits
from reducer.runtime import guard as guards
from reducer.runtime.guard import FAREWELL_S
from reducer.wire.header import Header
from reducer.wire.messages import decode_error
from tests.transport.guarded import FLOOD, MIB, PATIENCE, WAIT_S, M, answer, ended, rounds
from tests.waits import within_s


@pytest.mark.parametrize("greets", [False, True])
def test_who_joins_no_job_in_time_is_shown_out(post, *, greets):
    peer = post.stranger(greets=greets)
    post.now = PATIENCE.hello_s
    rounds(post)
    assert not ended(peer)
    assert (post.closed, post.guard.connections) == (0, 1)
    post.now = PATIENCE.hello_s + 0.1
    post.until(lambda: ended(peer))
    assert (post.closed, post.guard.connections) == (1, 0)


def test_a_stranger_without_a_name_is_shown_out(post, monkeypatch):
    """To find a connection's addresses takes a file, and there may be none left."""
    monkeypatch.setattr(tcp_connections, "name", lambda _: None)
    peer = post.stranger()
    post.now = PATIENCE.hello_s + 0.1
    post.until(lambda: ended(peer))


@pytest.mark.parametrize("says_hello", [False, True])
def test_who_is_not_welcome_is_given_no_room(post, *, says_hello):
    """For a payload it is given at once."""
    peer = post.stranger()
    if says_hello:
        peer.sendall(frame(Header(M.HELLO).pack(), MORE) + frame(b"no body"))
        post.until(lambda: post.engine.counters.refused == 1)
    peer.sendall(frame(Header(M.HELLO).pack(), MORE) + struct.pack(">BQ", LONG, MIB))
    post.until(lambda: ended(peer))
    assert post.closed == 0


def test_members_may_stay(post):
    worker = post.member("job")
    post.now = 5 * PATIENCE.hello_s
    rounds(post)
    assert post.members == {"job": 1}
    assert post.closed == 0
    worker.contribute(0, bytes(2 * guards.UNJOINED_BYTES))
    worker.say(worker.common._replace(type=M.GOODBYE).pack())
    post.until(lambda: post.members == {})
    rounds(post)
    worker.contribute(0, bytes(2 * guards.UNJOINED_BYTES))  # this was under way
    rounds(post)
    assert post.closed == 0, "it has as much time again as somebody new"
    post.now += PATIENCE.hello_s + 0.1
    post.until(lambda: post.closed == 1)


def test_who_was_a_member_is_a_stranger(post):
    worker = post.member("job", window=0)
    worker.say(worker.common._replace(type=M.GOODBYE).pack())
    post.until(lambda: post.members == {})
    post.step()
    worker.line.connection.settimeout(0.3)  # what is not read stops it
    with suppress(OSError):
        for chunk in range(4):
            worker.contribute(0, bytes(MIB), chunk * MIB)
    post.until(lambda: post.closed == 1)


@pytest.mark.parametrize(
    "post", [ConnectionLimits(3, 10.0), ConnectionLimits(9, 10.0, max_open=3)], indirect=True
)
def test_the_oldest_strangers_make_way(post):
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


@pytest.mark.parametrize("post", [ConnectionLimits(2, 10.0)], indirect=True)
def test_a_job_is_not_pushed_out_by_later_ones(post):
    """There may be too many, as those that were suspended are none until they come back."""
    post.transport.limit(3, 3)
    workers = []
    for name in "ab":
        post.now += 1
        workers.append(post.member(name))
    post.now += 1
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(Worker, post.address, "c")
        while "c" not in post.members:  # it joins before the guard looks
            post.loop.step(0.005)
    with closing(joining.result()) as latest:
        post.until(lambda: ended(latest.line.connection))
        assert not any(ended(worker.line.connection) for worker in workers)


@pytest.mark.parametrize("post", [ConnectionLimits(2, 10.0)], indirect=True)
def test_a_reducer_full_of_members_accepts_again_when_one_leaves(post):
    first, _ = [post.member(name) for name in "ab"]
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(Worker, post.address, "c")
        rounds(post)
        assert not joining.done()
        assert (post.members, post.closed) == ({"a": 1, "b": 1}, 0)
        first.close()
        post.until(joining.done)
    with closing(joining.result()):
        post.until(lambda: "c" in post.members)


@pytest.mark.parametrize("post", [ConnectionLimits(3, 10.0)], indirect=True)
def test_no_more_are_accepted_than_there_may_be(post):
    with ExitStack() as stack:
        peers = [stack.enter_context(dial(post.address)) for _ in range(30)]
        start = time.monotonic()
        while not all(map(ended, peers[:27])):
            within_s(WAIT_S, start)
            post.loop.step(0.005)
            found = psutil.Process().net_connections("tcp")
            ours = [each for each in found if each.laddr.port == post.transport.port]
            assert sum(bool(each.raddr) for each in ours) <= 3
        assert not any(map(ended, peers[27:])), "the latest may be about to say who they are"
        rounds(post)
        assert post.closed == 27


def test_a_member_waits_for_a_few_strangers_alone(post):
    worker = post.member("job", world_size=1)
    peers = [post.stranger() for _ in range(150)]
    for peer in peers:
        peer.sendall(frame(bytes(96)))  # it is told why not
    worker.contribute(1, bytes(64))
    start = time.monotonic()
    while post.engine.counters.results == 0:
        within_s(WAIT_S, start)
        post.loop.step(0.001)
    assert post.engine.counters.refused < 75, "half of them came first"
    post.until(lambda: post.engine.counters.refused == 150)


def test_the_guard_looks_more_often_while_there_is_reason(post):
    rounds(post, 2)
    assert post.guard.wait_s == guards.LOOK_S
    peer = post.stranger()
    assert post.guard.wait_s == guards.LOOK_SOON_S
    peer.close()
    post.until(lambda: post.guard.wait_s == guards.LOOK_S)


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_was_dropped_may_read_why_unless_it_goes_on(post, goes_on):
    worker = post.member("job")
    worker.say(b"no header")
    post.until(lambda: post.members == {})
    if goes_on:
        worker.line.connection.sendall(FLOOD)
    else:
        assert "header" in str(decode_error(answer(worker, M.ERROR)))
        post.now += FAREWELL_S - 0.1
        rounds(post)
        assert not ended(worker.line.connection)
        post.now += 0.2
    post.until(lambda: ended(worker.line.connection))
    assert post.closed == 1 or goes_on
