"""The reducer's rules one by one."""

import logging

import numpy as np
import pytest

from reducer.engine.engine import UNREACHABLE_S
from reducer.errors import RemoteProtocolError
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import ALL_REDUCERS, Loss, encode
from tests.engine.transcripts import transcripts
from tests.engine.words import M, kinds, told, with_ranks


def test_the_last_contribution_sends_the_result_to_all(reducer):
    assert reducer.contribute(1, value=2.0) == []
    sends = reducer.contribute(0, value=0.5)
    assert {send.peer for send in sends} == {b"0", b"1"}
    assert sends[0].payload is sends[1].payload  # shared, not copied
    assert Header.unpack(sends[0].header).pack() == sends[0].header, "what is set aside is 0"
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
    (send,) = reducer.served.receive(b"0", frame, payload)
    assert send.peer == b"0"
    assert isinstance(told([send])[b"0"], RemoteProtocolError)
    assert reducer.engine.counters.refused == 1
    assert reducer.dropped() == [b"0"]
    assert kinds(reducer.hello(0, peer=b"a new connection")) == [M.WELCOME]


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
    reducer.hello(0, peer=b"later", generation=3)
    assert caplog.messages[-1] == "job 'job': generation 0 ends, and 3 begins"
    facts = [(record.job, getattr(record, "rank", None)) for record in caplog.records]
    ranks = [None, 1, 1, None, 1, None, 1, 0]
    assert [rank for job, rank in facts if job == "another"] == ranks


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
    reducer.engine.peer_timed_out(b"new 1", 1.25)
    assert reducer.lose(b"new 1") == [], "it may have told others that it lost this reducer"
    (job,) = (job for job in reducer.engine.jobs if job.name == "another")
    _, lost = job.lost[1]
    assert str(lost) == (
        f"rank 1 on node-1 died or cannot be reached: "
        f"no heartbeat for {1.25 + UNREACHABLE_S:.1f} s "
        "(if it was only stopped, set REDUCTION_PATIENCE to more than that)"
    )


test_rules = transcripts("""
The lane at the address alone names the others
    new lanes=(7,8)
    0@0 HELLO job=a world_size=1 lane=0 -> 0 WELCOME lanes=(7,8)
    0@1 HELLO job=b world_size=1 lane=1 -> 1 WELCOME lanes=()

Repeated and late contributions are counted and dropped
    0 0 CONTRIBUTION
    1 CONTRIBUTION -> 0 1 RESULT
    1 CONTRIBUTION                              # of a chunk that is done
    counters duplicates=2
    0 CONTRIBUTION 1 watermark=1
    0 CONTRIBUTION
    counters late=1
    held 1024

A mismatch is told once to those who take part
    ranks 3
    0 CONTRIBUTION
    1 CONTRIBUTION bytes=68 -> 0 1 MismatchError rank=0 expected=64 other_rank=1 got=68
    0 CONTRIBUTION
    2 CONTRIBUTION -> 2 MismatchError           # it did not know yet
    held 0
    0 1 2 CONTRIBUTION 1 watermark=1 -> 0 1 2 RESULT

Chunks of another size are a mismatch
    0 CONTRIBUTION total_bytes=4096
    1 CONTRIBUTION total_bytes=4096 bytes=128 -> 0 1 MismatchError field=chunk_bytes

Ranks that were asked for different calls before are a mismatch
    0 CONTRIBUTION PLACES+1 since=3 history=MOST
    1 CONTRIBUTION PLACES+1 since=3 history=6
        -> 0 1 MismatchError field=history rank=0 expected=MOST other_rank=1 got=6
        says="all-reduce 1: ranks 0 and 1" says="since all-reduce 3"
    held 0

What came before is compared from the same call on
    0 CONTRIBUTION number(0) since=3 history=5
    1 CONTRIBUTION number(0) since=4 history=6 -> 0 1 RESULT
    0 1 CONTRIBUTION number(1) since=4 history=7 -> 0 1 RESULT
    taken 4

An ABORT counts although its watermark has passed the round
    0 CONTRIBUTION
    0 ABORT 0 RankLostError rank=7 watermark=1 -> 0 RankLostError
    held 0
    1 CONTRIBUTION -> 1 RankLostError rank=7

A timeout names who is missing
    ranks 2 world_size=4
    0 CONTRIBUTION
    0 ABORT 0 ReductionTimeout -> 0 ReductionTimeout missing=(1,2,3)
        says="rank 1, 2 (never joined), 3 (never joined)"

A rank that goes fails the rounds that lack it
    each goes: 1 GOODBYE | lose 1
    0 CONTRIBUTION number(0)                    # lacks rank 1
    1 CONTRIBUTION number(1)                    # does not
    $goes -> 0 RankLostError rank=1 sequence=number(0)
    0 CONTRIBUTION number(1) -> 0 RESULT
    0 CONTRIBUTION number(2) -> 0 RankLostError
    lose 0
    jobs

PINGs say who is gone
    pings PING_INTERVAL_S -> 0 1 PING payload=None
    1 GOODBYE
    pings 2*PING_INTERVAL_S -> 0 PING missing=(1,)
    1@anew HELLO -> anew WELCOME
    pings 3*PING_INTERVAL_S -> 0 anew PING payload=None

A rank may come back but not start anew
    0 1 CONTRIBUTION 5 watermark=5 -> 0 1 RESULT
    lose 1
    1@new HELLO -> new StaleGenerationError says="ranks 0 of another run"
    1 HELLO watermark=6 -> 1 WELCOME
    0 1 CONTRIBUTION 6 watermark=6 -> 0 1 RESULT

A rank may have passed a round that opens here
    0 CONTRIBUTION 3 watermark=3
    1 CONTRIBUTION 2                            # rank 0 holds the result, and will claim it
    rounds 2 3
    0 CONTRIBUTION 2 watermark=3                # not a contribution any more
    counters late=1

A taken rank is refused unless its holder is gone
    1@new HELLO -> 1 PING
    pings 0.0 -> 0 1 PING                       # and the holder has been reached
    time PING_INTERVAL_S
    time 1.0+CONTEST_SPARE_S -> new DuplicateRankError
    1@newest HELLO -> 1 PING
    unreachable 1 -> newest WELCOME

Settings must agree
    lose 1
    1@x HELLO reducers=2 -> 0 x MismatchError field=reducers rank=0 other_rank=1
    1@x HELLO chunk_bytes=64 -> 0 x MismatchError field=chunk_bytes rank=0 other_rank=1
    1@x HELLO patience_ms=2000 -> 0 x MismatchError field=patience_ms rank=0 other_rank=1
        says=REDUCTION_PATIENCE
    1@x HELLO world_size=3 -> 0 x MismatchError

A later generation ends the earlier
    0 CONTRIBUTION
    0@new HELLO generation=1 -> 0 1 StaleGenerationError, new WELCOME
    1 CONTRIBUTION -> 1 MembershipError
    1@old HELLO -> old StaleGenerationError generation=0 current=1

Memory is refused before it is taken
    new memory_limit=3*SPARE_CHUNKS*LARGEST_CHUNK
    0 HELLO window=0 -> 0 WELCOME
    0@other HELLO job="other job" chunk_bytes=64 -> other CapacityError
    1@x HELLO window=1<<20 -> x CapacityError
    1 HELLO window=0 -> 1 WELCOME               # that was set aside with rank 0's

Who exceeds the window is dropped, which never happens to the honest
    ranks 2 chunk_bytes=64
    0 CONTRIBUTION range(WINDOW//1024+SPARE_CHUNKS)
    held WINDOW+1024*SPARE_CHUNKS
    0 CONTRIBUTION WINDOW//1024+SPARE_CHUNKS -> 0 CapacityError
    dropped 0
    1 CONTRIBUTION MAX_ROUNDS_AHEAD -> 1 CapacityError
    dropped

A shutdown serves members until it is closed
    0 CONTRIBUTION number(0)
    drain -> 0 1 GOODBYE
    1 CONTRIBUTION number(0) -> 0 1 RESULT
    0@new HELLO job=new -> new ReducerLostError
    0 1 CONTRIBUTION number(1) -> 0 1 RESULT
    0 CONTRIBUTION number(2)
    close
    1 CONTRIBUTION number(2) -> 0 1 RESULT
    0 CONTRIBUTION number(3) -> 0 ReducerLostError reducer=here:1
""")
