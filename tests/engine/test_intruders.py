"""What a broken or hostile worker may try at a reducer."""

from reducer.engine.engine import MAX_DROPPED, MAX_LINES, REFUSALS_S
from reducer.engine.jobs import MAX_GIVEN_UP
from reducer.errors import CapacityError, ReducerLostError, RemoteProtocolError
from reducer.wire.messages import encode_error
from tests.engine.transcripts import transcripts
from tests.engine.words import M, Reducer, kinds, told


def test_errors_that_are_kept_hold_no_payload(reducer):
    reducer.lose(b"1")
    for sequence in range(3):
        assert told(reducer.contribute(0, sequence))[b"0"].rank == 1
    (job,) = reducer.engine.jobs
    assert all(job.rounds.get(sequence).error.__traceback__ is None for sequence in job.rounds)
    assert all(reason.__traceback__ is None for _, reason in job.lost.values())


def test_the_log_is_not_filled(reducer, caplog):
    caplog.set_level("INFO")
    reducer.tick()
    for peer in range(100):
        assert kinds(reducer.served.receive(b"peer %d" % peer, b"", b"")) == [M.ERROR]
    reducer.now += REFUSALS_S
    reducer.tick()
    assert len(caplog.records) == MAX_LINES + 1
    assert caplog.messages[-1] == f"{100 - MAX_LINES} more lines of that kind"


def test_dropped_peers_are_not_remembered_for_ever(reducer):
    for peer in range(MAX_DROPPED + 10):
        reducer.engine.receive(b"peer %d" % peer, b"", b"")
    assert len(reducer.engine.dropped) == MAX_DROPPED


def test_records_count_as_memory(implementation):
    reducer = Reducer(implementation, memory_limit=20 << 10)
    reducer.hello(0, world_size=1, window=0, chunk_bytes=64)
    (job,) = reducer.engine.jobs
    reserved = job.reserved
    for sequence in range(1000):  # each is complete at once, and none is ever finished
        sends = reducer.contribute(0, sequence, payload=bytes(64))
        assert job.rounds.used() <= job.reserved
        if kinds(sends) != [M.RESULT]:
            break
    error = told(sends)[b"0"]
    assert isinstance(error, CapacityError)
    assert error.limit == "memory_limit"
    assert job.reserved == reserved
    taken = job.rounds.used()
    reducer.contribute(0, sequence, watermark=sequence, payload=bytes(64))
    assert job.rounds.used() < taken
    assert kinds(reducer.contribute(0, sequence + 1, payload=bytes(64))) == [M.RESULT]


def test_records_of_a_failed_round_are_given_back(reducer):
    (job,) = reducer.engine.jobs
    taken = []
    for sequence in (0, 2):
        for offset in (0, 64):
            reducer.contribute(0, sequence, watermark=sequence, total_bytes=128, offset=offset)
        reducer.say(0, M.ABORT, sequence, encode_error(ReducerLostError("gone", reducer="x")))
        reducer.contribute_both(sequence + 1, watermark=sequence + 1)
        taken.append(job.rounds.used())
    assert taken[0] == taken[1]


def test_more_is_set_aside_for_records_while_there_is_room(implementation):
    reducer = Reducer(implementation, memory_limit=4 << 20)
    reducer.hello(0, world_size=1, window=0, chunk_bytes=64)
    (job,) = reducer.engine.jobs
    for sequence in range(100):
        assert kinds(reducer.contribute(0, sequence, payload=bytes(64))) == [M.RESULT]
    assert job.rounds.used() <= job.reserved == job.rounds.reserved <= 4 << 20


def test_ranges_that_are_given_up_are_counted(reducer):
    body = encode_error(ReducerLostError("gone", reducer="x"))
    for number in range(MAX_GIVEN_UP):
        for sequence in (4 * number, 4 * number + 1):  # as one, as if two ranks had said it
            assert told(reducer.say(0, M.ABORT, sequence, body, nbytes=1)) == {}
    (job,) = reducer.engine.jobs
    assert [(first, last) for first, last, _ in job.given_up[:2]] == [(0, 2), (4, 6)]
    error = told(reducer.say(0, M.ABORT, 4 * MAX_GIVEN_UP, body, nbytes=1))[b"0"]
    assert isinstance(error, RemoteProtocolError)


test_rules = transcripts("""
A HELLO that is refused ends no earlier generation
    1@x HELLO generation=9 claims=job job=another -> x RemoteProtocolError
    1@y HELLO generation=9 claims=job world_size=1 -> y RemoteProtocolError
    1@z HELLO generation=9 claims=job window=1<<60 -> z CapacityError
    0 1 CONTRIBUTION -> 0 1 RESULT

A full reducer takes a later generation
    new memory_limit=3*(WINDOW+(1<<20)) max_jobs=1
    0 HELLO -> 0 WELCOME
    0@other HELLO job=other -> other CapacityError
    0@new HELLO generation=1 -> 0 StaleGenerationError, new WELCOME

A rank that contradicts itself is named
    0 CONTRIBUTION total_bytes=128
    0 CONTRIBUTION total_bytes=128 offset=64 dtype=DType.INT32 wire_dtype=DType.INT32
        -> 0 MismatchError rank=0 other_rank=0

A refused contribution changes no watermark
    0 1 CONTRIBUTION -> 0 1 RESULT
    1 CONTRIBUTION 1+MAX_ROUNDS_AHEAD watermark=1 -> 1 CapacityError
    0 CONTRIBUTION 1 watermark=1
    rounds 0 1
    1 CONTRIBUTION 1 watermark=1 -> 0 1 RESULT
    rounds 1

A chunk larger than the settings allow is refused
    0 CONTRIBUTION bytes=(1<<20)+4 -> 0 RemoteProtocolError

A contest is refused while the reducer shuts down
    1@new HELLO -> 1 PING
    drain -> 0 1 GOODBYE
    unreachable 1 -> new ReducerLostError

The compiled loop takes what is healthy
    0 1 CONTRIBUTION 2 watermark=2 -> 0 1 RESULT
    0 1 CONTRIBUTION 3 watermark=3 -> 0 1 RESULT
    taken 4
    counters contributions=4
    rounds 3
    0 CONTRIBUTION 12 watermark=12
    1 CONTRIBUTION 12 watermark=12 op=ReduceOp.MAX -> 0 1 MismatchError # the engine's own work
    taken 5
    0 1 CONTRIBUTION 13 watermark=13 -> 0 1 RESULT
    0 1 CONTRIBUTION 14 watermark=14 -> 0 1 RESULT
    taken 7                                     # that round is forgotten, and all is well again

A contribution in another's name is refused
    each who: 1 CONTRIBUTION job=1 | 1 CONTRIBUTION generation=1 | 0@1 CONTRIBUTION
    0 CONTRIBUTION
    $who -> 1 RemoteProtocolError, 0 RankLostError rank=1 says="broke the protocol"

A chunk that cuts a block is refused
    each type: BLOCK8 | BLOCK8_E4M3
    each wrong, why: op=ReduceOp.MIN "MIN is not defined for"
        | offset=64 "multiples of 256 for" | bytes=192 "multiples of 256 for"
    0 1 CONTRIBUTION bytes=256 dtype=DType.$type wire_dtype=DType.$type -> 0 1 RESULT
    1 CONTRIBUTION 1 bytes=256 dtype=DType.$type wire_dtype=DType.$type total_bytes=1024 $wrong
        -> 1 RemoteProtocolError says="$why $type"

A result says what it is of and nothing of a worker
    0 CONTRIBUTION 5 watermark=4 tag=7 since=2 history=9
    1 CONTRIBUTION 5 watermark=5 tag=7 since=2 history=9
        -> 0 1 RESULT job=JOB sequence=5 total_bytes=64 nbytes=64 offset=0 dtype=DType.FLOAT32
        op=ReduceOp.SUM wire_dtype=DType.FLOAT32 tag=7 watermark=4 rank=0 generation=0 epoch=0
        since=0 history=0 window=0 flags=0

Who breaks the protocol is told once
    0 WELCOME 0 -> 0 RemoteProtocolError
    dropped 0
    0 WELCOME 0
    0 HELLO
    0 CONTRIBUTION
    counters dropped=1 ignored=3
    dropped

Who is unknown is told once and may say HELLO
    new
    0 CONTRIBUTION -> 0 MembershipError
    0 CONTRIBUTION
    0 HELLO -> 0 WELCOME

Who tries on and on is dropped
    new memory_limit=1
    0 0 0 0 0 0 0 HELLO -> 0 0 0 0 0 0 0 CapacityError  # one less than `MAX_REFUSALS`
    0 HELLO -> 0 CapacityError
    0 HELLO
    dropped 0

Refusals are forgotten with time
    new memory_limit=1
    0 0 0 0 0 0 0 HELLO -> 0 0 0 0 0 0 0 CapacityError
    later REFUSALS_S
    0 0 0 0 0 0 0 HELLO -> 0 0 0 0 0 0 0 CapacityError
    dropped

A rank of a job that does not read is dropped
    stop_reading 1 -> 1 CapacityError
    0 CONTRIBUTION -> 0 RankLostError rank=1

Ranks that go on without a result get their window back
    0 CONTRIBUTION number(0)
    1 CONTRIBUTION number(1) watermark=number(1)
    0 CONTRIBUTION number(1) watermark=number(1) -> 0 1 RESULT
    rounds number(1)
    held 0

Watermarks that leap cost no more than others
    0 CONTRIBUTION
    0 CONTRIBUTION 1<<60 watermark=1<<60
    1 CONTRIBUTION 1<<60 watermark=1<<60 -> 0 1 RESULT
    rounds 1<<60
    0 1 CONTRIBUTION 1+(1<<60) watermark=1+(1<<60) -> 0 1 RESULT
    rounds 1+(1<<60)

What is too much is refused by name
    each name, limit, much, of, with, generation:
        MAX_JOBS max_jobs 1 job another 0
        | MAX_RANKS max_ranks 2 world_size 3 1
        | MEMORY_LIMIT memory_limit 1<<30 world_size 1<<16 1
        | MAX_CHUNK_BYTES max_chunk_bytes 1<<20 chunk_bytes 2<<20 1
        | JOB_MEMORY_LIMIT job_memory_limit 4<<20 window 1<<20 0
        | MEMORY_LIMIT memory_limit 1<<30 window (1<<64)-1 0
    new $limit=$much
    0 HELLO -> 0 WELCOME
    1 HELLO $of=$with generation=$generation -> 1 CapacityError limit=$limit says=REDUCTION_$name
    counters over_limit=1
    1@new HELLO -> new WELCOME
""")
