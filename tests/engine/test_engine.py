"""The reducer's rules one by one."""

import logging

import numpy as np
import pytest

from reducer.engine.engine import AWAY_S, CONTEST_SPARE_S, PING_INTERVAL_S
from reducer.errors import (
    CapacityError,
    DuplicateRankError,
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
    RemoteProtocolError,
    StaleGenerationError,
)
from reducer.wire.constants import MAX_ROUNDS_AHEAD, PLACES, SPARE_CHUNKS
from reducer.wire.header import Header, fingerprint
from reducer.wire.layout import LARGEST_CHUNK
from reducer.wire.messages import (
    ALL_REDUCERS,
    Loss,
    Stragglers,
    Welcome,
    decode,
    encode,
    encode_error,
)
from tests.engine.words import WINDOW, M, Reducer, kinds, lost_rank, number, told, with_ranks


def test_the_last_contribution_sends_the_result_to_all(reducer):
    assert reducer.contribute(1, value=2.0) == []
    sends = reducer.contribute(0, value=0.5)
    assert {send.peer for send in sends} == {b"0", b"1"}
    assert sends[0].payload is sends[1].payload  # shared, not copied
    assert (np.frombuffer(sends[0].payload, np.float32) == 2.5).all()
    assert kinds(sends) == [M.RESULT, M.RESULT]
    assert reducer.engine.held() == 0


def test_the_fold_is_in_rank_order(implementation):
    values = [1e8, 1.0, -1e8, 1.0]
    expected = np.float32(0)
    for value in values:
        expected = np.float32(expected + np.float32(value))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        reducer = with_ranks(implementation, 4)
        sends = [reducer.contribute(rank, value=values[rank]) for rank in order][-1]
        assert (np.frombuffer(sends[0].payload, np.float32) == expected).all()


def test_the_lane_at_the_address_alone_names_the_others(implementation):
    reducer = Reducer(implementation, lanes=(7, 8))
    for lane, named in ((0, (7, 8)), (1, ())):
        (welcome,) = reducer.hello(0, peer=b"%d" % lane, job=f"{lane}", world_size=1, lane=lane)
        assert tuple(decode(Welcome, welcome.payload).lanes) == named


def test_repeated_and_late_contributions_are_counted_and_dropped(reducer):
    reducer.contribute(0)
    assert reducer.contribute(0) == []
    reducer.contribute(1)
    assert reducer.contribute(1) == []  # of a chunk that is done
    assert reducer.engine.counters.duplicates == 2
    reducer.contribute(0, sequence=1, watermark=1)
    assert reducer.contribute(0, sequence=0, watermark=0) == []
    assert reducer.engine.counters.late == 1
    assert reducer.engine.held() == 1024


def test_a_mismatch_is_told_once_to_those_who_take_part(implementation):
    reducer = with_ranks(implementation, 3)
    reducer.contribute(0)
    errors = told(reducer.contribute(1, payload=bytes(68)))
    assert errors.keys() == {b"0", b"1"}
    for error in errors.values():
        assert isinstance(error, MismatchError)
        assert (error.rank, error.expected, error.other_rank, error.got) == (0, 64, 1, 68)
    assert reducer.contribute(0, offset=0) == []
    late = told(reducer.contribute(2))  # does not know yet, and is told now
    assert isinstance(late[b"2"], MismatchError)
    assert reducer.engine.held() == 0
    for rank in range(3):  # the next round is a new one
        sends = reducer.contribute(rank, sequence=1, watermark=1)
    assert kinds(sends) == [M.RESULT] * 3


def test_chunks_of_another_size_are_a_mismatch(reducer):
    reducer.contribute(0, total_bytes=4096)
    errors = told(reducer.contribute(1, total_bytes=4096, payload=bytes(128)))
    assert {error.field for error in errors.values()} == {"chunk_bytes"}


def test_ranks_that_were_asked_for_different_calls_before_are_a_mismatch(reducer):
    most = (1 << 64) - 1
    reducer.contribute(0, sequence=PLACES + 1, since=3, history=most)
    errors = told(reducer.contribute(1, sequence=PLACES + 1, since=3, history=6))
    assert errors.keys() == {b"0", b"1"}
    for error in errors.values():
        assert isinstance(error, MismatchError)
        assert error.field == "history"
        assert (error.rank, error.expected, error.other_rank, error.got) == (0, most, 1, 6)
        assert str(error).startswith("all-reduce 1: ranks 0 and 1")
        assert "since all-reduce 3" in str(error)
    assert reducer.engine.held() == 0


def test_what_came_before_is_compared_from_the_same_call_on(reducer, implementation):
    reducer.contribute(0, number(0), since=3, history=5)
    assert kinds(reducer.contribute(1, number(0), since=4, history=6)) == [M.RESULT] * 2
    assert kinds(reducer.contribute_both(number(1), since=4, history=7)) == [M.RESULT] * 2
    assert reducer.served.taken == (4 if implementation == "compiled" else 0)


def test_an_abort_counts_although_its_watermark_has_passed_the_round(reducer):
    reducer.contribute(0)
    body = encode_error(RankLostError("gone", rank=7))
    sends = reducer.say(0, M.ABORT, 0, body, watermark=1)
    assert isinstance(told(sends)[b"0"], RankLostError)
    assert reducer.engine.held() == 0
    assert lost_rank(reducer.contribute(1), b"1") == 7


def test_a_timeout_names_who_is_missing(implementation):
    reducer = with_ranks(implementation, 2, world_size=4)
    reducer.contribute(0)
    body = encode_error(ReductionTimeout("not done after 1 s"))
    error = told(reducer.say(0, M.ABORT, 0, body))[b"0"]
    assert isinstance(error, ReductionTimeout)
    assert error.missing == (1, 2, 3)
    assert "rank 1, 2 (never joined), 3 (never joined)" in str(error)


@pytest.mark.parametrize("politely", [True, False])
def test_a_rank_that_goes_fails_the_rounds_that_lack_it(reducer, politely):
    reducer.contribute(0, number(0))  # lacks rank 1
    reducer.contribute(1, number(1))  # does not
    if politely:
        sends = reducer.say(1, M.GOODBYE, (1 << 64) - 1)
    else:
        assert reducer.engine.unreachable(b"1") == []  # it may come back
        sends = reducer.engine.tick(AWAY_S)
    errors = told(sends)
    assert errors.keys() == {b"0"}
    assert errors[b"0"].rank == 1
    assert errors[b"0"].sequence == number(0)
    (result,) = reducer.contribute(0, number(1))  # one contribution of each rank is there
    assert Header.unpack(result.header).type is M.RESULT
    assert isinstance(told(reducer.contribute(0, number(2)))[b"0"], RankLostError)
    assert reducer.engine.unreachable(b"0") == []
    assert told(reducer.engine.tick(2 * AWAY_S)) == {}
    assert reducer.engine.jobs == []


def test_pings_say_who_is_gone(reducer):
    def said(seconds):
        pings = [one for one in reducer.engine.tick(seconds) if kinds([one]) == [M.PING]]
        return [one.payload and decode(Stragglers, one.payload).missing for one in pings]

    assert said(PING_INTERVAL_S) == [None, None]
    reducer.say(1, M.GOODBYE, 0)
    assert said(2 * PING_INTERVAL_S) == [(1,)]
    reducer.hello(1, peer=b"anew")
    assert said(3 * PING_INTERVAL_S) == [None, None]


def test_a_rank_may_come_back_but_not_start_anew(reducer):
    reducer.contribute_both(sequence=5, watermark=5)
    reducer.lose(b"1")
    refusal = told(reducer.hello(1, peer=b"new"))[b"new"]
    assert isinstance(refusal, StaleGenerationError)
    assert "ranks 0 of another run" in str(refusal)
    assert kinds(reducer.hello(1, peer=b"1", watermark=6)) == [M.WELCOME]
    assert kinds(reducer.contribute_both(sequence=6, watermark=6)) == [M.RESULT] * 2


def test_a_rank_may_have_passed_a_round_that_opens_here(reducer):
    reducer.contribute(0, sequence=3, watermark=3)
    assert reducer.contribute(1, sequence=2) == []  # rank 0 holds the result, and will claim it
    assert reducer.rounds() == {2, 3}
    assert reducer.contribute(0, sequence=2, watermark=3) == []  # not a contribution any more
    assert reducer.engine.counters.late == 1


def test_a_taken_rank_is_refused_unless_its_holder_is_gone(reducer):
    (ping,) = reducer.hello(1, peer=b"new")
    assert (ping.peer, Header.unpack(ping.header).type) == (b"1", M.PING)
    reducer.engine.tick(0.0)  # pings again, and the holder has been reached
    sends = reducer.engine.tick(PING_INTERVAL_S)
    assert M.ERROR not in kinds(sends)
    refusals = told(reducer.engine.tick(1.0 + CONTEST_SPARE_S))
    assert isinstance(refusals[b"new"], DuplicateRankError)

    reducer.hello(1, peer=b"newest")
    sends = reducer.engine.unreachable(b"1")
    assert [(s.peer, Header.unpack(s.header).type) for s in sends] == [(b"newest", M.WELCOME)]


def test_settings_must_agree(reducer):
    reducer.lose(b"1")
    for change in ({"reducers": 2}, {"chunk_bytes": 64}, {"patience_ms": 2000}):
        error = told(reducer.hello(1, peer=b"x", **change))[b"x"]
        assert isinstance(error, MismatchError)
        assert error.field == next(iter(change))
        assert (error.rank, error.other_rank) == (0, 1)
    assert "REDUCTION_PATIENCE" in str(error)
    assert isinstance(told(reducer.hello(1, peer=b"x", world_size=3))[b"x"], MismatchError)


def test_a_later_generation_ends_the_earlier(reducer):
    reducer.contribute(0)
    sends = reducer.hello(0, peer=b"new", generation=1)
    errors = told(sends)
    assert errors.keys() == {b"0", b"1"}
    assert all(isinstance(error, StaleGenerationError) for error in errors.values())
    assert isinstance(told(reducer.contribute(1))[b"1"], MembershipError)
    refusal = told(reducer.hello(1, peer=b"old", generation=0))[b"old"]
    assert (refusal.generation, refusal.current) == (0, 1)


def test_memory_is_refused_before_it_is_taken(implementation):
    reducer = Reducer(implementation, memory_limit=3 * SPARE_CHUNKS * LARGEST_CHUNK)
    assert kinds(reducer.hello(0, window=0)) == [M.WELCOME]
    error = told(reducer.hello(0, peer=b"other", job="other job", chunk_bytes=64))[b"other"]
    assert isinstance(error, CapacityError)
    larger = told(reducer.hello(1, peer=b"x", window=1 << 20))[b"x"]
    assert isinstance(larger, CapacityError)
    assert kinds(reducer.hello(1, window=0)) == [M.WELCOME]  # it was set aside with rank 0's


def test_who_exceeds_the_window_is_refused(implementation):
    reducer = with_ranks(implementation, 2, chunk_bytes=64)
    most = WINDOW // 1024 + SPARE_CHUNKS  # these preceded what was in flight when they were sent
    for sequence in range(most):
        assert reducer.contribute(0, sequence) == []
    assert reducer.engine.held() == 1024 * most
    error = told(reducer.contribute(0, sequence=most))[b"0"]
    assert isinstance(error, CapacityError)
    assert reducer.engine.newly_dropped() == [b"0"], "that is nothing that happens to the honest"
    error = told(reducer.contribute(1, sequence=MAX_ROUNDS_AHEAD))[b"1"]
    assert isinstance(error, CapacityError)
    assert reducer.engine.newly_dropped() == []


def test_a_shutdown_serves_members_until_it_is_closed(reducer):
    reducer.contribute(0, number(0))
    assert kinds(reducer.engine.drain()) == [M.GOODBYE] * 2
    assert kinds(reducer.contribute(1, number(0))) == [M.RESULT] * 2
    refusal = told(reducer.hello(0, peer=b"new", job="new"))[b"new"]
    assert isinstance(refusal, ReducerLostError)
    assert kinds(reducer.contribute_both(number(1))) == [M.RESULT] * 2
    reducer.contribute(0, number(2))
    reducer.engine.close()
    assert kinds(reducer.contribute(1, number(2))) == [M.RESULT] * 2
    error = told(reducer.contribute(0, number(3)))[b"0"]
    assert isinstance(error, ReducerLostError)
    assert error.reducer == "here:1"


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (b"", b""),
        (b"x" * 96, b""),
        (Header(M.RESULT).pack(), b""),
        (Header(M.CONTRIBUTION, job=1).pack(), b""),
        (Header(M.CONTRIBUTION, job=fingerprint("job"), rank=1).pack(), b""),
        (Header(M.CONTRIBUTION, job=fingerprint("job"), wire_dtype=1).pack(), b""),
        (Header(M.RETAINED, job=fingerprint("job"), nbytes=4).pack(), b""),
        (Header(M.SHARD_MAP, job=fingerprint("job")).pack(), b"{}"),
        (Header(M.SHARD_MAP, job=fingerprint("job")).pack(), encode(Loss(1, 0))),
        (Header(M.ABORT, job=fingerprint("job")).pack(), b""),
        (Header(M.ABORT, job=fingerprint("job"), sequence=1).pack(), b"{}"),
        (Header(M.HELLO).pack(), b"{}"),
    ],
)
def test_what_breaks_the_protocol_concerns_its_sender_alone(reducer, frame, payload):
    (send,) = reducer.engine.receive(b"0", frame, payload)
    assert send.peer == b"0"
    assert isinstance(told([send])[b"0"], RemoteProtocolError)
    assert reducer.engine.counters.refused == 1
    assert reducer.engine.newly_dropped() == [b"0"]
    assert kinds(reducer.hello(0, peer=b"a new connection")) == [M.WELCOME]


def test_a_stranger_is_told_to_say_hello(reducer):
    frame = Header(M.CONTRIBUTION, job=fingerprint("job")).pack()
    (send,) = reducer.engine.receive(b"stranger", frame, b"")
    assert type(told([send])[b"stranger"]) is MembershipError


def test_the_life_of_a_job_is_in_the_log(reducer, caplog):
    caplog.set_level(logging.INFO)
    for rank in range(2):
        reducer.hello(rank, peer=b"new %d" % rank, job="another")
    assert caplog.messages[-1] == "job 'another': all 2 ranks are here"
    reducer.lose(b"new 1")
    assert caplog.messages[-1] == "job 'another': rank 1 died or cannot be reached"
    reducer.hello(1, peer=b"back", job="another")
    assert caplog.messages[-2] == "job 'another': rank 1 is back"
    assert caplog.messages[-1] == "job 'another': all 2 ranks are here"
    reducer.engine.unreachable(b"back")
    reducer.hello(1, peer=b"back at once", job="another")
    assert caplog.messages[-2] == "job 'another': rank 1 is back"
    reducer.lose(b"back at once")
    reducer.lose(b"new 0")
    assert caplog.messages[-1] == "job 'another': rank 0 died or cannot be reached, the last one"
    facts = [(record.job, getattr(record, "rank", None)) for record in caplog.records]
    ranks = [None, 1, 1, None, 1, None, 1, 0]
    assert [rank for job, rank in facts if job == "another"] == ranks


def test_a_later_generation_is_in_the_log(reducer, caplog):
    caplog.set_level(logging.INFO)
    reducer.hello(0, peer=b"later", generation=3)
    assert caplog.messages == ["job 'job': generation 0 ends, and 3 begins"]
    assert caplog.records[0].job == "job"


def test_the_loss_of_a_reducer_is_in_the_log_once(implementation, caplog):
    caplog.set_level(logging.INFO)
    reducer = with_ranks(implementation, 2, reducers=2)
    caplog.clear()
    for rank in range(2):
        reducer.say(rank, M.SHARD_MAP, 0, encode(Loss(1, 0)))
    text = "job 'job': rank 0 has lost reducer 1 (of 0 to 1), and goes on without it"
    assert caplog.messages == [text]
    assert (caplog.records[0].job, caplog.records[0].rank) == ("job", 0)
    reducer.say(1, M.SHARD_MAP, 0, encode(Loss(1, 0, stage=1)))  # of what rank 0 told as well
    assert caplog.messages == [text]
    reducer.say(1, M.SHARD_MAP, 0, encode(Loss(ALL_REDUCERS, 1)))
    assert caplog.messages[1:] == ["job 'job': rank 1 has lost all reducers, and begins anew"]


def test_who_falls_silent_is_named_with_its_host_and_for_how_long(reducer):
    for rank in range(2):
        reducer.hello(rank, peer=b"new %d" % rank, job="another", host_name=f"node-{rank}")
    reducer.now = 100.0
    reducer.tick()
    reducer.engine.silent(b"new 1", 1.25)
    assert reducer.lose(b"new 1") == [], "it may have told others that it lost this reducer"
    (job,) = (job for job in reducer.engine.jobs if job.name == "another")
    _, lost = job.lost[1]
    assert str(lost) == (
        f"rank 1 on node-1 died or cannot be reached: no heartbeat for {1.25 + AWAY_S:.1f} s "
        "(if it was only stopped, set REDUCTION_PATIENCE to more than that)"
    )
