"""What a broken or hostile worker may try at a reducer."""

import pytest

from reducer.engine.engine import MAX_DROPPED, MAX_LINES, MAX_REFUSALS, REFUSALS_S
from reducer.engine.jobs import MAX_GIVEN_UP
from reducer.engine.limits import Limits
from reducer.errors import CapacityError, ReducerLostError, RemoteProtocolError
from reducer.wire.constants import MAX_ROUNDS_AHEAD, DType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import encode_error
from tests.engine.words import M, Reducer, kinds, told, two_chunks, with_ranks


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"job": "another"}, RemoteProtocolError),
        ({"world_size": 1}, RemoteProtocolError),
        ({"window": 1 << 60}, CapacityError),
    ],
)
def test_a_hello_that_is_refused_ends_no_earlier_generation(reducer, change, expected):
    (refusal,) = reducer.hello(1, peer=b"x", generation=9, claims="job", **change)
    assert isinstance(told([refusal])[b"x"], expected)
    assert kinds(reducer.contribute_both()) == [M.RESULT] * 2


def test_a_rank_that_contradicts_itself_is_named(reducer):
    two_chunks(reducer, 0, 0)
    errors = told(two_chunks(reducer, 0, 64, dtype=DType.INT32, wire_dtype=DType.INT32))
    assert (errors[b"0"].rank, errors[b"0"].other_rank) == (0, 0)


def test_a_refused_contribution_changes_no_watermark(reducer):
    reducer.contribute_both()
    refusal = told(reducer.contribute(1, sequence=1 + MAX_ROUNDS_AHEAD, watermark=1))
    assert isinstance(refusal[b"1"], CapacityError)
    reducer.contribute(0, sequence=1, watermark=1)
    assert reducer.rounds() == {0, 1}
    reducer.contribute(1, sequence=1, watermark=1)
    assert reducer.rounds() == {1}


def test_a_chunk_larger_than_the_settings_allow_is_refused(reducer):
    errors = told(reducer.contribute(0, payload=bytes((1 << 20) + 4)))
    assert isinstance(errors[b"0"], RemoteProtocolError)


def test_errors_that_are_kept_hold_no_payload(reducer):
    reducer.lose(b"1")
    for sequence in range(3):
        assert told(reducer.contribute(0, sequence))[b"0"].rank == 1
    (job,) = reducer.engine.jobs
    assert all(job.rounds.get(sequence).error.__traceback__ is None for sequence in job.rounds)
    assert all(reason.__traceback__ is None for _, reason in job.lost.values())


def test_a_contest_is_refused_while_the_reducer_shuts_down(reducer):
    reducer.hello(1, peer=b"new")
    reducer.engine.drain()
    sends = reducer.engine.unreachable(b"1")
    assert isinstance(told(sends)[b"new"], ReducerLostError)


def test_the_compiled_loop_takes_what_is_healthy():
    reducer = with_ranks("compiled", 2)
    for sequence in range(2, 12):
        reducer.contribute_both(sequence, watermark=sequence)
    assert reducer.served.taken == 20
    assert reducer.engine.counters.contributions == 20
    assert reducer.rounds() == {11}
    reducer.contribute(0, 12, watermark=12)
    reducer.contribute(1, 12, watermark=12, op=ReduceOp.MAX)  # the engine fails this round
    assert reducer.served.taken == 21
    for sequence in (13, 14):
        reducer.contribute_both(sequence, watermark=sequence)
    assert reducer.served.taken == 21 + 2, "the failed round is forgotten, and all is well again"


@pytest.mark.parametrize("change", [{"job": 1}, {"generation": 1}, {"rank": 0}])
def test_a_contribution_in_anothers_name_is_refused(reducer, change):
    reducer.contribute(0)
    errors = told(reducer.contribute(**{"rank": 1, "peer": b"1", **change}))
    assert isinstance(errors[b"1"], RemoteProtocolError)
    assert errors[b"0"].rank == 1
    assert "broke the protocol" in str(errors[b"0"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"op": ReduceOp.MIN}, "MIN is not defined for"),
        ({"offset": 64, "total_bytes": 1024}, "multiples of 256 for"),
        ({"payload": bytes(192), "total_bytes": 1024}, "multiples of 256 for"),
    ],
)
@pytest.mark.parametrize("dtype", [DType.BLOCK8, DType.BLOCK8_E4M3])
def test_a_chunk_that_cuts_a_block_is_refused(reducer, dtype, change, match):
    blocks = {"dtype": dtype, "wire_dtype": dtype, "payload": bytes(256)}
    assert len(reducer.contribute_both(**blocks)) == 2, "whole ones are summed"
    errors = told(reducer.contribute(1, 1, **blocks | change))
    assert isinstance(errors[b"1"], RemoteProtocolError)
    assert f"{match} {dtype.name}" in str(errors[b"1"])


def test_a_result_says_what_it_is_of_and_nothing_of_a_worker(reducer):
    said = {"tag": 7, "since": 2, "history": 9}
    reducer.contribute(0, 5, watermark=4, **said)
    sends = reducer.contribute(1, 5, watermark=5, **said)
    expected = Header(
        M.RESULT,
        job=fingerprint("job"),
        sequence=5,
        total_bytes=64,
        nbytes=64,
        dtype=DType.FLOAT32,
        op=ReduceOp.SUM,
        wire_dtype=DType.FLOAT32,
        tag=7,
        watermark=4,  # what all ranks have finished
    )
    assert [Header.unpack(send.header) for send in sends] == [expected, expected]


def test_a_worker_sends_no_results(reducer):
    reducer.contribute(0)
    errors = told(reducer.contribute(1, type=M.RESULT))
    assert isinstance(errors[b"1"], RemoteProtocolError)
    assert errors[b"0"].rank == 1


def test_who_breaks_the_protocol_is_told_once(reducer):
    assert told(reducer.say(0, M.WELCOME, 0)).keys() == {b"0"}
    assert reducer.engine.newly_dropped() == [b"0"]
    assert reducer.say(0, M.WELCOME, 0) == []
    assert reducer.hello(0) == []
    assert reducer.contribute(0) == []
    assert (reducer.engine.counters.dropped, reducer.engine.counters.ignored) == (1, 3)
    assert reducer.engine.newly_dropped() == []


def test_who_is_unknown_is_told_once_and_may_say_hello(implementation):
    reducer = Reducer(implementation)
    assert kinds(reducer.contribute(0)) == [M.ERROR]
    assert reducer.contribute(0) == []
    assert kinds(reducer.hello(0)) == [M.WELCOME]


def test_who_tries_on_and_on_is_dropped(implementation):
    reducer = Reducer(implementation, memory_limit=1)
    for _ in range(MAX_REFUSALS):
        assert kinds(reducer.hello(0)) == [M.ERROR]
    assert reducer.hello(0) == []
    assert reducer.engine.newly_dropped() == [b"0"]


def test_refusals_are_forgotten_with_time(implementation):
    reducer = Reducer(implementation, memory_limit=1)
    for _ in range(MAX_REFUSALS):
        reducer.now += REFUSALS_S
        reducer.tick()
        assert kinds(reducer.hello(0)) == [M.ERROR]
    assert reducer.engine.newly_dropped() == []


def test_the_log_is_not_filled(reducer, caplog):
    caplog.set_level("INFO")
    reducer.tick()
    for peer in range(100):
        assert kinds(reducer.engine.receive(b"peer %d" % peer, b"", b"")) == [M.ERROR]
    reducer.now += REFUSALS_S
    reducer.tick()
    assert len(caplog.records) == MAX_LINES + 1
    assert caplog.messages[-1] == f"{100 - MAX_LINES} more lines of that kind"


def test_dropped_peers_are_not_remembered_for_ever(reducer):
    for peer in range(MAX_DROPPED + 10):
        reducer.engine.receive(b"peer %d" % peer, b"", b"")
    assert len(reducer.engine.dropped) == MAX_DROPPED


@pytest.mark.parametrize(
    ("limits", "change", "limit"),
    [
        (Limits(max_jobs=1), {"job": "another"}, "max_jobs"),
        (Limits(max_ranks=2), {"world_size": 3, "generation": 1}, "max_ranks"),
        (Limits(), {"world_size": 1 << 16, "generation": 1}, "memory_limit"),
        (
            Limits(max_chunk_bytes=1 << 20),
            {"chunk_bytes": 2 << 20, "generation": 1},
            "max_chunk_bytes",
        ),
        (Limits(job_memory_limit=4 << 20), {"window": 1 << 20}, "job_memory_limit"),
        (Limits(), {"window": (1 << 64) - 1}, "memory_limit"),
    ],
)
def test_what_is_too_much_is_refused_by_name(implementation, limits, change, limit):
    reducer = Reducer(implementation, limits=limits)
    assert kinds(reducer.hello(0)) == [M.WELCOME]
    error = told(reducer.hello(1, peer=b"1", **change))[b"1"]
    assert isinstance(error, CapacityError)
    assert error.limit == limit
    assert f"REDUCTION_{limit.upper()}" in str(error)
    assert reducer.engine.counters.over_limit == 1
    assert kinds(reducer.hello(1, peer=b"new")) == [M.WELCOME]


def test_a_full_reducer_takes_a_later_generation(implementation):
    reducer = Reducer(implementation)
    reducer.hello(0)
    (job,) = reducer.engine.jobs
    reducer = Reducer(implementation, job.reserved, Limits(max_jobs=1))
    reducer.hello(0)
    assert kinds(reducer.hello(0, peer=b"new", generation=1))[0] is M.WELCOME


def test_records_count_as_memory(implementation):
    reducer = Reducer(implementation, memory_limit=20 << 10)
    reducer.hello(0, world_size=1, window=0, chunk_bytes=64)
    (job,) = reducer.engine.jobs
    reserved = job.reserved
    for sequence in range(1000):  # each is complete at once, and none is ever finished
        sends = reducer.contribute(0, sequence, payload=bytes(64))
        assert job.rounds.taken() <= job.reserved
        if kinds(sends) != [M.RESULT]:
            break
    error = told(sends)[b"0"]
    assert isinstance(error, CapacityError)
    assert error.limit == "memory_limit"
    assert job.reserved == reserved
    taken = job.rounds.taken()
    reducer.contribute(0, sequence, watermark=sequence, payload=bytes(64))
    assert job.rounds.taken() < taken
    assert kinds(reducer.contribute(0, sequence + 1, payload=bytes(64))) == [M.RESULT]


def test_records_of_a_failed_round_are_given_back(reducer):
    (job,) = reducer.engine.jobs
    taken = []
    for sequence in (0, 2):
        two_chunks(reducer, 0, 0, 64, sequence=sequence, watermark=sequence)
        reducer.say(0, M.ABORT, sequence, encode_error(ReducerLostError("gone", reducer="x")))
        reducer.contribute_both(sequence + 1, watermark=sequence + 1)
        taken.append(job.rounds.taken())
    assert taken[0] == taken[1]


def test_more_is_set_aside_for_records_while_there_is_room(implementation):
    reducer = Reducer(implementation, memory_limit=4 << 20)
    reducer.hello(0, world_size=1, window=0, chunk_bytes=64)
    (job,) = reducer.engine.jobs
    for sequence in range(100):
        assert kinds(reducer.contribute(0, sequence, payload=bytes(64))) == [M.RESULT]
    assert job.rounds.taken() <= job.reserved == job.rounds.reserved <= 4 << 20


def test_ranges_that_are_given_up_are_counted(reducer):
    body = encode_error(ReducerLostError("gone", reducer="x"))
    for number in range(MAX_GIVEN_UP):
        for sequence in (4 * number, 4 * number + 1):  # as one, as if two ranks had said it
            assert told(reducer.say(0, M.ABORT, sequence, body, nbytes=1)) == {}
    (job,) = reducer.engine.jobs
    assert [(first, last) for first, last, _ in job.given_up[:2]] == [(0, 2), (4, 6)]
    error = told(reducer.say(0, M.ABORT, 4 * MAX_GIVEN_UP, body, nbytes=1))[b"0"]
    assert isinstance(error, RemoteProtocolError)


def test_a_rank_of_a_job_that_does_not_read_is_dropped(reducer):
    sends = reducer.engine.drop(b"1", CapacityError("reads nothing", limit="window"))
    assert told(sends).keys() == {b"1"}
    assert told(reducer.contribute(0))[b"0"].rank == 1


def test_ranks_that_go_on_without_a_result_get_their_window_back(reducer):
    reducer.contribute(0)
    for rank in (1, 0):
        reducer.contribute(rank, sequence=1, watermark=1)
    assert reducer.rounds() == {1}
    assert reducer.engine.held() == 0


def test_watermarks_that_leap_cost_no_more_than_others(reducer):
    far = 1 << 60
    for sequence in (0, far):
        reducer.contribute(0, sequence, watermark=sequence)
    reducer.contribute(1, far, watermark=far)
    assert reducer.rounds() == {far}
    sends = reducer.contribute_both(far + 1, watermark=far + 1)
    assert kinds(sends) == [M.RESULT] * 2
    assert reducer.rounds() == {far + 1}
