"""What the guard allows members of jobs, and what not."""

import time

import pytest

from hostile.zmtp import COMMAND, MORE, frame
from reducer.clock import MOST_S
from reducer.runtime import guard as guards
from reducer.runtime.transport import Line
from reducer.wire.constants import MessageType
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
    while "job" in post.members:  # the kernel holds megabytes before the loop has to
        worker.contribute(0, payload, chunk << 18)
        chunk += 1
        assert chunk < 1000
        post.step()
    assert post.members == {"other": 1}
    rounds(post)  # now the connection has ended, and the transport is closed after it


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


def test_members_of_many_jobs_have_their_turns(post, monkeypatch):
    monkeypatch.setattr(guards, "MEMBERS_PER_LOOK", 2)
    for number in range(6):
        post.member(f"job {number}")
    looked = []

    def count(line, now, load=Line.load):
        looked.append(line.number)
        return load(line, now)

    monkeypatch.setattr(Line, "load", count)
    rounds(post, 4)
    assert len(looked) <= 4 * 2
    rounds(post, 4)
    assert len(set(looked)) == 6


def test_who_joins_or_leaves_between_a_jobs_turns_is_known_at_once(post, monkeypatch):
    for number in range(6):
        post.member(f"job {number}", window=MIB)
    rounds(post)
    monkeypatch.setattr(guards, "MEMBERS_PER_LOOK", 0.5)  # a turn in 13 looks or more
    for number in range(6):
        worker = post.member(f"job {number}", rank=1, window=MIB)
        worker.contribute(0, bytes(MIB // 4))
        rounds(post, 3)
    assert post.closed == 0, "they are no strangers, who may not say as much"
    worker.say(worker.common._replace(type=MessageType.GOODBYE).pack())
    rounds(post, 3)
    post.now += 100.0
    rounds(post, 1)
    assert post.closed == 1, "it has joined no other job in time"


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
    rounds(post)
    assert post.members == {"job": 1}


def test_what_waits_to_be_read_was_heard(post):
    """The loop may not have polled since, if this process was stopped meanwhile."""
    worker = post.member("job")
    ((_, connection),) = inside.connections(post.guard).items()
    rounds(post)
    worker.say(worker.common.pack())
    eventually(lambda: connection.line.load(10.0).idle_s == 0.0, 5.0)
    assert connection.line.load(20.0).idle_s == 0.0  # nobody has read it since
    rounds(post)
    assert connection.line.load(30.0).idle_s > 0


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
