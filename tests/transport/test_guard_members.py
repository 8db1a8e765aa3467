"""What the guard allows members of jobs, and what not."""

import time

import pytest

from hostile.zmtp import COMMAND, MORE, frame
from reducer.clock import MOST_S
from reducer.runtime import guard as guards
from reducer.runtime.guard import STUCK_LOOKS
from reducer.runtime.plain_transport import PlainLine
from reducer.tcp_connections import Traffic
from tests import inside
from tests.transport.guarded import MIB, PING, ended, rounds
from tests.waits import eventually


def test_who_sends_beyond_its_window_is_dropped(post):
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


def test_who_reads_no_results_is_dropped_and_does_not_hold_up_the_end(post):
    worker = post.member("job", world_size=1, window=MIB)
    post.member("other", world_size=1, window=MIB)
    payload, chunk = bytes(1 << 18), 0
    while "job" in post.members:  # the kernel holds megabytes before libzmq has to
        worker.contribute(0, payload, chunk << 18)
        chunk += 1
        assert chunk < 1000
        post.step()
    assert post.members == {"other": 1}
    rounds(post)  # now libzmq has ended the connection, and the context is destroyed after it


def test_what_is_in_slots_counts_as_well(post):
    worker = post.member("job")
    post.member("job", rank=1)
    (job,) = post.engine.jobs
    worker.contribute(0, bytes(MIB))
    post.until(lambda: post.engine.held() > MIB // 2)
    job.rounds.reserved = post.engine.held() * 8 // 9  # the guard adds an eighth
    rounds(post)
    assert post.members == {"job": 2}
    worker.line.connection.sendall(frame(bytes(2 * MIB), MORE)[: MIB * 3 // 4])
    post.until(lambda: post.members == {"job": 1})
    assert job.members.keys() == {1}, "it is the other one's fault"


@pytest.mark.parametrize("impl", ["compiled"], indirect=True)
@pytest.mark.parametrize(
    ("begins", "wrong"),
    [
        ([], frame(bytes(1 << 16), MORE)[:100]),
        ([96], frame(bytes(8 * MIB), MORE)[:100]),
        ([96, 10], frame(bytes(1 << 16), MORE)[:100]),
        ([0] * 10, frame(b"", MORE) * 10),
    ],
    ids=["at once", "payload", "third frame", "without an end"],
)
def test_a_frame_where_none_may_be_ends_the_connection(post, begins, wrong):
    worker = post.member("job", window=64 * MIB)
    for nbytes in begins:
        worker.line.connection.sendall(frame(bytes(nbytes), MORE))
    rounds(post)
    assert not ended(worker.line.connection)
    worker.line.connection.sendall(wrong)
    post.until(lambda: ended(worker.line.connection))
    assert post.guard.connections == 0


@pytest.mark.parametrize("impl", ["plain"], indirect=True)
def test_a_message_without_an_end_is_found_out(post):
    worker = post.member("job", window=64 * MIB)
    worker.line.connection.sendall(frame(bytes(1 << 16), MORE) * 32)
    for _ in range(2 * STUCK_LOOKS):
        post.step()
    assert post.members == {"job": 1}
    post.now += guards.STUCK_S
    post.until(lambda: post.members == {})
    assert post.engine.counters.dropped == 1


def test_who_is_stuck():
    connection = guards.Connection(PlainLine(0, ()), 0.0, 0.0)
    assert not any(connection.is_stuck(3, float(now), endless=False) for now in range(100))
    found = [
        connection.is_stuck(3, float(at), endless=endless)
        for at, endless in enumerate((True, False, True, True, True), 100)
    ]
    assert found == [False, False, False, False, True], "who is taken from is not"
    connection = guards.Connection(PlainLine(0, ()), 0.0, 0.0)  # nor anybody by looks in no time
    times = [0.0] * 50 + [guards.STUCK_S / 2] * 50 + [guards.STUCK_S]
    assert [connection.is_stuck(3, at, endless=True) for at in times] == [False] * 100 + [True]


@pytest.mark.parametrize("impl", ["plain"], indirect=True)
def test_what_a_broken_connection_had_said_is_not_the_next_ones(post):
    gone = post.member("first")
    first = post.engine.jobs[0].members[0].peer
    gone.close()
    post.until(lambda: post.guard.connections == 0)
    worker = post.member("second")
    ((number, connection),) = inside.connections(post.guard).items()
    for late in (first, b"unheard of"):  # of the same descriptor, and read only now
        post.transport.note(late, connection.line.descriptor, 1000)
    assert post.transport.connection(first) != number
    post.transport.note(b"second's", connection.line.descriptor, 1000)
    assert post.transport.connection(b"second's") == number
    assert post.transport.connection(b"unheard of") == 0
    post.transport.note(b"unheard of", connection.line.descriptor, 1000)
    assert post.transport.connection(b"unheard of") == 0
    worker.close()


def test_heartbeats_are_allowed_and_no_credit():
    looked_at = PlainLine(0, ())
    for look in range(10_000):
        load = looked_at.weigh(Traffic(look // 2, 0), 0, 0, look / 1000)  # 500 bytes a second
    assert load.unread <= 1, "however often the guard looks"
    assert looked_at.weigh(Traffic(MIB, 0), 0, 0, 10.0).unread > MIB // 2, "at once"
    idle = PlainLine(0, ())
    for day in range(100):
        idle.weigh(Traffic(0, 0), 0, 0, day * 24 * 3600.0)
    load = idle.weigh(Traffic(MIB, 0), 0, 0, 99 * 24 * 3600.0 + 1)
    assert load.unread > MIB // 2, "what was not sent is not saved up"
    looked_at = PlainLine(0, ())
    for at in range(100):  # the peer reads everything, and libzmq's heartbeats as well
        passed = Traffic(1000 * at, 1000 * at + 100 * at)
        load = looked_at.weigh(passed, 1000 * at, 1000 * at, float(at))
        assert (load.unread, load.unsent) == (0, 0)
    assert looked_at.weigh(Traffic(99_000, 108_900), 99_000, 99_000 + MIB, 100.0).unsent == MIB


def test_members_of_many_jobs_have_their_turns(post, monkeypatch):
    monkeypatch.setattr(guards, "MEMBERS_PER_LOOK", 2)
    for number in range(6):
        post.member(f"job {number}")
    looked = []
    (kind,) = {type(connection.line) for connection in inside.connections(post.guard).values()}

    def count(line, member, now, load=kind.load):
        if member is not None:
            looked.append(member)
        return load(line, member, now)

    monkeypatch.setattr(kind, "load", count)
    rounds(post, 4)
    assert len(looked) <= 4 * 2
    rounds(post, 4)
    assert len(set(looked)) == 6


def test_each_job_is_patient_for_as_long_as_it_says(post):
    for name, patience_ms in (("short", 500), ("long", 5000)):
        post.member(name, patience_ms=patience_ms)
    begun = time.monotonic()

    def found():
        post.now = time.monotonic() - begun
        return len(silent(post)) == 1

    post.until(found)
    assert 0.4 < time.monotonic() - begun < 3.0
    assert silent(post) == ["short"]
    assert post.closed == 0, "that is no fault of its own"
    post.until(lambda: post.guard.connections == 1)


@pytest.mark.parametrize("begins", ["not", "half", "all but the last frame"])
def test_heartbeats_do_not_stand_for_the_rest_of_a_message(post, begins):
    worker = post.member("job", patience_ms=500, window=MIB)
    header = frame(worker.common.pack(), MORE)
    if begins == "half":
        worker.line.connection.sendall((header + frame(bytes(MIB)))[: MIB // 2])
    elif begins != "not":
        worker.line.connection.sendall(header + frame(bytes(MIB), MORE))
    for _ in range(20):
        if not silent(post):
            worker.line.connection.sendall(frame(PING, COMMAND))
        rounds(post, 2)
        post.now += 0.1
    assert silent(post) == ["job"] * (begins != "not")


def test_a_message_may_come_slowly(post):
    worker = post.member("job", patience_ms=500, window=MIB)
    whole = frame(worker.common.pack(), MORE) + frame(bytes(MIB))
    for at in range(0, 20 * 4096, 4096):
        worker.line.connection.sendall(whole[at : at + 4096])
        rounds(post, 2)
        post.now += 0.1
    assert silent(post) == []
    rounds(post, 2 * STUCK_LOOKS)
    assert post.members == {"job": 1}


@pytest.mark.parametrize("impl", ["compiled"], indirect=True)
def test_what_waits_to_be_read_was_heard(post):
    """The loop may not have polled since, if this process was stopped meanwhile."""
    worker = post.member("job")
    ((_, connection),) = inside.connections(post.guard).items()
    rounds(post)
    worker.say(worker.common.pack())
    eventually(lambda: connection.line.load(None, 10.0).silent_s == 0.0, 5.0)
    assert connection.line.load(None, 20.0).silent_s == 0.0  # nobody has read it since
    rounds(post)
    assert connection.line.load(None, 30.0).silent_s > 0


def test_a_reducer_that_did_not_run_has_missed_nobody(post):
    post.member("job", patience_ms=500)
    rounds(post, 2)
    time.sleep(0.8)  # the kernel knows of it, and the clock of the loop does not
    post.now += MOST_S
    rounds(post)
    assert silent(post) == []
    post.now += 0.5 - MOST_S
    rounds(post)
    assert silent(post) == []
    post.now += 0.1
    post.until(lambda: silent(post) == ["job"])


def silent(post):
    """Names of jobs of which a member is given up in a while."""
    away = inside.away(post.engine)
    return [job.name for job in post.engine.jobs for m in job.members.values() if m.peer in away]
