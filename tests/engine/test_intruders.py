"""What a broken or hostile worker may try at a reducer."""

from __future__ import annotations

import pytest

from reducer.errors import (
    CapacityError,
    ReducerLostError,
    RemoteProtocolError,
)
from reducer.wire.constants import DType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, encode
from tests.engine.words import WINDOW, M, Reducer, kinds, told, two_chunks


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"job": "another"}, RemoteProtocolError),
        ({"world_size": 1}, RemoteProtocolError),
        ({"window": 1 << 60}, CapacityError),
    ],
)
def test_a_hello_that_is_refused_ends_no_earlier_generation(
    reducer: Reducer, change: dict, expected: type
) -> None:
    settings = {"job": "job", "world_size": 2} | change
    window = settings.pop("window", WINDOW)
    header = Header(M.HELLO, job=fingerprint("job"), generation=9, rank=1, window=window)
    body = encode(Hello(reducers=1, reducer_index=0, **settings))
    (refusal,) = reducer.engine.receive(b"x", header.pack(), body)
    assert isinstance(told([refusal])[b"x"], expected)
    reducer.contribute(0)
    assert kinds(reducer.contribute(1)) == [M.RESULT] * 2


def test_a_rank_that_contradicts_itself_is_named(reducer: Reducer) -> None:
    two_chunks(reducer, 0, 0)
    errors = told(two_chunks(reducer, 0, 64, dtype=DType.INT32, wire_dtype=DType.INT32))
    assert (errors[b"0"].rank, errors[b"0"].other_rank) == (0, 0)


def test_a_refused_contribution_changes_no_watermark(reducer: Reducer) -> None:
    for rank in range(2):
        reducer.contribute(rank)
    refusal = told(reducer.contribute(1, sequence=1 << 20, watermark=1))
    assert isinstance(refusal[b"1"], CapacityError)
    reducer.contribute(0, sequence=1, watermark=1)
    assert reducer.rounds() == {0, 1}
    reducer.contribute(1, sequence=1, watermark=1)
    assert reducer.rounds() == {1}


def test_a_chunk_larger_than_the_settings_allow_is_refused(reducer: Reducer) -> None:
    errors = told(reducer.contribute(0, payload=bytes((1 << 20) + 4)))
    assert isinstance(errors[b"0"], RemoteProtocolError)


def test_errors_that_are_kept_hold_no_payload(reducer: Reducer) -> None:
    reducer.lose(b"1")
    for sequence in range(3):
        assert told(reducer.contribute(0, sequence))[b"0"].rank == 1
    (job,) = reducer.engine.jobs
    assert all(round_.error.__traceback__ is None for _, round_ in job.rounds.items())
    assert all(reason.__traceback__ is None for _, reason in job.gone.values())


def test_a_claim_is_refused_while_the_reducer_shuts_down(reducer: Reducer) -> None:
    reducer.hello(1, peer=b"new")
    reducer.engine.drain()
    sends = reducer.engine.unreachable(b"1")
    assert isinstance(told(sends)[b"new"], ReducerLostError)


def test_the_compiled_loop_takes_what_is_healthy() -> None:
    reducer = Reducer("compiled")
    for rank in range(2):
        reducer.hello(rank)
    for sequence in range(10):
        for rank in range(2):
            reducer.contribute(rank, sequence, watermark=sequence)
    assert reducer.served.taken == 20
    assert reducer.engine.counters.contributions == 20
    assert reducer.rounds() == {9}
    reducer.contribute(0, 10, watermark=10)
    reducer.contribute(1, 10, watermark=10, op=ReduceOp.MAX)  # the engine fails this round
    assert reducer.served.taken == 21
    for rank in range(2):
        reducer.contribute(rank, 11, watermark=11)
    for rank in range(2):
        reducer.contribute(rank, 12, watermark=12)
    assert reducer.served.taken == 21 + 2, "the failed round is forgotten, and all is well again"


@pytest.mark.parametrize("change", [{"job": 1}, {"generation": 1}, {"rank": 0}])
def test_a_contribution_in_anothers_name_is_refused(reducer: Reducer, change: dict) -> None:
    reducer.contribute(0)
    header = Header(
        M.CONTRIBUTION,
        job=fingerprint("job"),
        sequence=0,
        total_bytes=64,
        nbytes=64,
        rank=1,
        dtype=DType.FLOAT32,
        op=ReduceOp.SUM,
        wire_dtype=DType.FLOAT32,
    )._replace(**change)
    sends = reducer.served.receive(b"1", header.pack(), bytes(64))
    assert isinstance(told(sends)[b"1"], RemoteProtocolError)
    assert len(reducer.contribute(1)) == 2  # the round is as it was


def test_a_result_says_what_it_is_of_and_nothing_of_a_worker(reducer: Reducer) -> None:
    reducer.contribute(0, 5, watermark=4, tag=7)
    sends = reducer.contribute(1, 5, watermark=5, tag=7)
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


def test_a_worker_sends_no_results(reducer: Reducer) -> None:
    reducer.contribute(0)
    sends = reducer.contribute(1, type=M.RESULT)
    assert isinstance(told(sends)[b"1"], RemoteProtocolError)
    assert len(reducer.contribute(1)) == 2


def test_ranks_that_go_on_without_a_result_get_their_window_back(reducer: Reducer) -> None:
    reducer.contribute(0)
    for rank in (1, 0):
        reducer.contribute(rank, sequence=1, watermark=1)
    assert reducer.rounds() == {1}
    assert reducer.engine.held() == 0


def test_watermarks_that_leap_cost_no_more_than_others(reducer: Reducer) -> None:
    far = 1 << 60
    for sequence in (0, far):
        reducer.contribute(0, sequence, watermark=sequence)
    reducer.contribute(1, far, watermark=far)
    assert reducer.rounds() == {far}
    for rank in range(2):
        sends = reducer.contribute(rank, far + 1, watermark=far + 1)
    assert kinds(sends) == [M.RESULT] * 2
    assert reducer.rounds() == {far + 1}
