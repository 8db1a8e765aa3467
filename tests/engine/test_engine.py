"""The reducer's rules one by one."""

from __future__ import annotations

import numpy as np
import pytest

from reducer.engine import CLAIM_PATIENCE_S, PING_INTERVAL_S
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
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, decode_error, encode, encode_error
from tests.engine.twins import IMPLEMENTATIONS, Served

M = MessageType
WINDOW = 1 << 16


class Reducer:
    """An engine, and the words of its workers."""

    def __init__(self, implementation: str, memory_limit: int = 1 << 30) -> None:
        self.served = Served(implementation, memory_limit=memory_limit, address="here:1")
        self.engine = self.served.engine

    def hello(self, rank: int, world_size: int = 2, peer: bytes | None = None, **change) -> list:
        fields = {"generation": 0, "watermark": 0, "window": WINDOW}
        fields |= {name: change.pop(name) for name in list(change) if name in fields}
        settings = {"job": "job", "reducers": 1, "reducer_index": 0} | change
        header = Header(M.HELLO, job=fingerprint(settings["job"]), rank=rank, **fields)
        body = encode(Hello(world_size=world_size, **settings))
        return self.served.receive(peer or b"%d" % rank, header.pack(), body)

    def contribute(self, rank: int, sequence: int = 0, value: float = 1.0, **change) -> list:
        payload = change.pop("payload", np.full(16, value, np.float32).tobytes())
        header = Header(
            M.CONTRIBUTION,
            job=fingerprint("job"),
            sequence=sequence,
            total_bytes=len(payload),
            nbytes=len(payload),
            rank=rank,
            dtype=DType.FLOAT32,
            op=ReduceOp.SUM,
            wire_dtype=DType.FLOAT32,
        )._replace(**change)
        return self.served.receive(b"%d" % rank, header.pack(), payload)

    def say(self, rank: int, kind: MessageType, sequence: int, body: bytes = b"", **change) -> list:
        header = Header(kind, job=fingerprint("job"), rank=rank, sequence=sequence, **change)
        return self.served.receive(b"%d" % rank, header.pack(), body)

    def rounds(self) -> set[int]:
        return {sequence for job in self.engine.jobs for sequence in job.rounds}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reducer(implementation: str) -> Reducer:
    """Two ranks of one job, both welcome."""
    reducer = Reducer(implementation)
    for rank in range(2):
        (send,) = reducer.hello(rank)
        assert Header.unpack(send.header).type is M.WELCOME
    return reducer


def told(sends: list) -> dict[bytes, Exception]:
    """Errors by peer."""
    found = {}
    for send in sends:
        header = Header.unpack(send.header)
        if header.type is M.ERROR:
            assert send.peer not in found
            found[send.peer] = decode_error(send.payload, header.sequence)
    return found


def kinds(sends: list) -> list[MessageType]:
    return [Header.unpack(send.header).type for send in sends]


def test_the_last_contribution_sends_the_result_to_all(reducer: Reducer) -> None:
    assert reducer.contribute(1, value=2.0) == []
    sends = reducer.contribute(0, value=0.5)
    assert {send.peer for send in sends} == {b"0", b"1"}
    assert sends[0].payload is sends[1].payload  # shared, not copied
    assert (np.frombuffer(sends[0].payload, np.float32) == 2.5).all()
    assert kinds(sends) == [M.RESULT, M.RESULT]
    assert reducer.engine.held() == 0


def test_the_fold_is_in_rank_order(implementation: str) -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    expected = np.float32(0)
    for value in values:
        expected = np.float32(expected + np.float32(value))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        reducer = Reducer(implementation)
        for rank in range(4):
            reducer.hello(rank, world_size=4)
        sends = [reducer.contribute(rank, value=values[rank]) for rank in order][-1]
        assert (np.frombuffer(sends[0].payload, np.float32) == expected).all()


def test_repeated_and_late_contributions_are_counted_and_dropped(reducer: Reducer) -> None:
    reducer.contribute(0)
    assert reducer.contribute(0) == []
    reducer.contribute(1)
    assert reducer.contribute(1) == []  # of a chunk that is done
    assert reducer.engine.counters.duplicates == 2
    reducer.contribute(0, sequence=1, watermark=1)
    assert reducer.contribute(0, sequence=0, watermark=0) == []
    assert reducer.engine.counters.late == 1
    assert reducer.engine.held() == 1024


def test_rounds_are_forgotten_when_every_rank_has_passed_them(reducer: Reducer) -> None:
    for sequence in range(100):
        for rank in range(2):
            reducer.contribute(rank, sequence, watermark=sequence)
        assert reducer.rounds() <= {sequence - 1, sequence}
    assert reducer.engine.counters.results == 200


def test_a_mismatch_is_told_once_to_those_who_take_part(implementation: str) -> None:
    reducer = Reducer(implementation)
    for rank in range(3):
        reducer.hello(rank, world_size=3)
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


def test_chunks_of_another_size_are_a_mismatch(reducer: Reducer) -> None:
    reducer.contribute(0, total_bytes=4096)
    errors = told(reducer.contribute(1, total_bytes=4096, payload=bytes(128)))
    assert {error.field for error in errors.values()} == {"chunk_bytes"}


def test_an_abort_counts_although_its_watermark_has_passed_the_round(reducer: Reducer) -> None:
    reducer.contribute(0)
    body = encode_error(RankLostError("gone", rank=7))
    sends = reducer.say(0, M.ABORT, 0, body, watermark=1)
    assert isinstance(told(sends)[b"0"], RankLostError)
    assert reducer.engine.held() == 0
    error = told(reducer.contribute(1))[b"1"]
    assert isinstance(error, RankLostError)
    assert error.rank == 7


def test_a_timeout_names_who_is_missing(implementation: str) -> None:
    reducer = Reducer(implementation)
    for rank in (0, 1):
        reducer.hello(rank, world_size=4)
    reducer.contribute(0)
    body = encode_error(ReductionTimeout("not done after 1 s"))
    error = told(reducer.say(0, M.ABORT, 0, body))[b"0"]
    assert isinstance(error, ReductionTimeout)
    assert error.missing == (1, 2, 3)
    assert "rank 1, 2 (never joined), 3 (never joined)" in str(error)


@pytest.mark.parametrize("politely", [True, False])
def test_a_rank_that_goes_fails_the_rounds_that_lack_it(reducer: Reducer, politely: bool) -> None:
    reducer.contribute(0, sequence=0)  # lacks rank 1
    reducer.contribute(1, sequence=1)  # does not
    if politely:
        sends = reducer.say(1, M.GOODBYE, (1 << 64) - 1)
    else:
        sends = reducer.engine.unreachable(b"1")
    errors = told(sends)
    assert errors.keys() == {b"0"}
    assert errors[b"0"].rank == 1
    assert errors[b"0"].sequence == 0
    (result,) = reducer.contribute(0, sequence=1)  # one contribution of each rank is there
    assert Header.unpack(result.header).type is M.RESULT
    assert isinstance(told(reducer.contribute(0, sequence=2))[b"0"], RankLostError)
    assert reducer.engine.unreachable(b"0") == []
    assert reducer.engine.jobs == []


def test_a_rank_may_come_back_but_not_start_anew(reducer: Reducer) -> None:
    for rank in range(2):
        reducer.contribute(rank, sequence=5, watermark=5)
    reducer.engine.unreachable(b"1")
    refusal = told(reducer.hello(1, peer=b"new"))[b"new"]
    assert isinstance(refusal, StaleGenerationError)
    assert "ranks 0 of an earlier run" in str(refusal)
    assert kinds(reducer.hello(1, peer=b"1", watermark=6)) == [M.WELCOME]
    reducer.contribute(0, sequence=6, watermark=6)
    assert kinds(reducer.contribute(1, sequence=6, watermark=6)) == [M.RESULT] * 2


def test_a_round_that_a_rank_has_passed_cannot_open_again(reducer: Reducer) -> None:
    reducer.contribute(0, sequence=3, watermark=3)
    error = told(reducer.contribute(1, sequence=2))[b"1"]
    assert isinstance(error, RankLostError)
    assert error.rank == 0


def test_a_taken_rank_is_refused_unless_its_holder_is_gone(reducer: Reducer) -> None:
    (ping,) = reducer.hello(1, peer=b"new")
    assert (ping.peer, Header.unpack(ping.header).type) == (b"1", M.PING)
    reducer.engine.tick(0.0)  # pings again, and the holder has been reached
    sends = reducer.engine.tick(PING_INTERVAL_S)
    assert M.ERROR not in kinds(sends)
    refusals = told(reducer.engine.tick(CLAIM_PATIENCE_S))
    assert isinstance(refusals[b"new"], DuplicateRankError)

    reducer.hello(1, peer=b"newest")
    sends = reducer.engine.unreachable(b"1")
    assert [(s.peer, Header.unpack(s.header).type) for s in sends] == [(b"newest", M.WELCOME)]


def test_settings_must_agree(reducer: Reducer) -> None:
    reducer.engine.unreachable(b"1")
    for change in ({"reducers": 2}, {"chunk_bytes": 64}, {"world_size": 3}):
        error = told(reducer.hello(1, peer=b"x", **change))[b"x"]
        assert isinstance(error, MismatchError)
        assert error.field == next(iter(change))
        assert (error.rank, error.other_rank) == (0, 1)


def test_a_later_generation_ends_the_earlier(reducer: Reducer) -> None:
    reducer.contribute(0)
    sends = reducer.hello(0, peer=b"new", generation=1)
    errors = told(sends)
    assert errors.keys() == {b"0", b"1"}
    assert all(isinstance(error, StaleGenerationError) for error in errors.values())
    assert isinstance(told(reducer.contribute(1))[b"1"], MembershipError)
    refusal = told(reducer.hello(1, peer=b"old", generation=0))[b"old"]
    assert (refusal.generation, refusal.current) == (0, 1)


def test_memory_is_refused_before_it_is_taken(implementation: str) -> None:
    reducer = Reducer(implementation, memory_limit=3 * (1 << 20))
    assert kinds(reducer.hello(0, window=0)) == [M.WELCOME]  # one chunk may always be in flight
    error = told(reducer.hello(0, peer=b"other", job="other job", chunk_bytes=64))[b"other"]
    assert isinstance(error, CapacityError)
    assert kinds(reducer.hello(1, window=1 << 20)) == [
        M.WELCOME
    ]  # its part was set aside with rank 0's


def test_who_exceeds_the_window_is_refused(reducer: Reducer) -> None:
    for sequence in range(WINDOW // 1024):
        assert reducer.contribute(0, sequence) == []
    assert reducer.engine.held() == WINDOW
    error = told(reducer.contribute(0, sequence=WINDOW // 1024))[b"0"]
    assert isinstance(error, CapacityError)
    error = told(reducer.contribute(1, sequence=1 << 14))[b"1"]
    assert isinstance(error, CapacityError)


def test_a_shutdown_finishes_open_rounds_and_refuses_new_ones(reducer: Reducer) -> None:
    reducer.contribute(0)
    assert kinds(reducer.engine.drain()) == [M.GOODBYE] * 2
    assert kinds(reducer.contribute(1)) == [M.RESULT] * 2
    error = told(reducer.contribute(0, sequence=1))[b"0"]
    assert isinstance(error, ReducerLostError)
    assert error.reducer == "here:1"
    refusal = told(reducer.hello(0, peer=b"new", job="new"))[b"new"]
    assert isinstance(refusal, ReducerLostError)


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (b"", b""),
        (b"x" * 96, b""),
        (Header(M.RESULT).pack(), b""),
        (Header(M.CONTRIBUTION, job=1).pack(), b""),
        (Header(M.CONTRIBUTION, job=fingerprint("job"), rank=1).pack(), b""),
        (Header(M.CONTRIBUTION, job=fingerprint("job"), epoch=1).pack(), b""),
        (Header(M.ABORT, job=fingerprint("job")).pack(), b""),
        (Header(M.ABORT, job=fingerprint("job"), sequence=1).pack(), b"{}"),
        (Header(M.HELLO).pack(), b"{}"),
    ],
)
def test_what_breaks_the_protocol_concerns_its_sender_alone(
    reducer: Reducer, frame: bytes, payload: bytes
) -> None:
    (send,) = reducer.engine.receive(b"0", frame, payload)
    assert send.peer == b"0"
    assert isinstance(told([send])[b"0"], RemoteProtocolError)
    assert reducer.engine.counters.refused == 1
    reducer.contribute(0)
    assert kinds(reducer.contribute(1)) == [M.RESULT] * 2


def test_a_stranger_is_told_to_say_hello(reducer: Reducer) -> None:
    frame = Header(M.CONTRIBUTION, job=fingerprint("job")).pack()
    (send,) = reducer.engine.receive(b"stranger", frame, b"")
    assert type(told([send])[b"stranger"]) is MembershipError


# -- ranks that go and come back --------------------------------------------------------------


def two_chunks(reducer: Reducer, rank: int, *offsets: int, **change) -> list:
    """Contribute some chunks of a buffer of two."""
    sends = []
    for offset in offsets:
        sends += reducer.contribute(rank, total_bytes=128, offset=offset, **change)
    return sends


def test_contributions_of_two_lives_are_not_mixed(reducer: Reducer) -> None:
    two_chunks(reducer, 1, 0)
    assert reducer.engine.unreachable(b"1") == []  # nobody waits for it yet
    assert kinds(reducer.hello(1)) == [M.WELCOME]
    assert reducer.engine.held() == 0
    errors = told(two_chunks(reducer, 1, 0, 64))
    assert isinstance(errors[b"1"], RankLostError)
    errors = told(two_chunks(reducer, 0, 0))
    assert errors[b"0"].rank == 1
    assert reducer.engine.held() == 0


def test_a_rank_that_comes_back_to_a_round_that_is_done_is_told(reducer: Reducer) -> None:
    reducer.contribute(1)
    reducer.contribute(0)
    reducer.engine.unreachable(b"1")
    reducer.hello(1)
    errors = told(reducer.contribute(1))
    assert errors[b"1"].rank == 1


def test_a_rank_that_comes_back_is_told_of_a_failure_again(reducer: Reducer) -> None:
    body = encode_error(RankLostError("gone", rank=7))
    assert told(reducer.say(1, M.ABORT, 0, body)).keys() == {b"1"}
    reducer.engine.unreachable(b"1")
    reducer.hello(1)
    assert told(reducer.contribute(1))[b"1"].rank == 7


@pytest.mark.parametrize("watermark", [0, 1])
def test_nobody_waits_for_a_rank_that_came_back_without_its_rounds(
    reducer: Reducer, watermark: int
) -> None:
    two_chunks(reducer, 0, 0)
    assert kinds(two_chunks(reducer, 1, 0)) == [M.RESULT] * 2  # one chunk is done
    reducer.engine.unreachable(b"1")
    reducer.hello(1, watermark=watermark)
    errors = told(two_chunks(reducer, 0, 64))
    assert errors[b"0"].rank == 1


def test_what_a_rank_gave_before_it_came_back_is_dropped(implementation: str) -> None:
    reducer = Reducer(implementation)
    for rank in range(3):
        reducer.hello(rank, world_size=3)
    for rank in range(2):
        reducer.contribute(rank)
    assert reducer.engine.unreachable(b"1") == []  # rank 2 may still complete it
    errors = told(reducer.hello(1, world_size=3))
    assert errors.keys() == {b"0"}
    assert errors[b"0"].rank == 1
    assert reducer.engine.held() == 0


def test_nobody_waits_for_a_rank_that_joins_later_than_the_round(
    implementation: str, reducer: Reducer
) -> None:
    reducer = Reducer(
        implementation
    )  # it was restarted, and rank 1 gave up what rank 0 has just begun
    reducer.hello(0, watermark=3)
    reducer.contribute(0, sequence=3)
    errors = told(reducer.hello(1, watermark=4))
    assert errors[b"0"].rank == 1


def test_a_rank_that_joins_late_learns_why_a_round_failed(implementation: str) -> None:
    reducer = Reducer(implementation)
    for rank in range(2):
        reducer.hello(rank, world_size=3)
    reducer.contribute(0)
    reducer.contribute(1, op=ReduceOp.MAX)
    for rank in range(2):
        reducer.contribute(rank, sequence=1, watermark=1)
    reducer.hello(2, world_size=3)
    assert isinstance(told(reducer.contribute(2))[b"2"], MismatchError)


# -- what a broken or hostile worker may try --------------------------------------------------


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


def test_a_refused_contribution_still_gives_up_what_its_watermark_passes(
    reducer: Reducer,
) -> None:
    reducer.contribute(0)
    refusal = told(reducer.contribute(1, sequence=1 << 20, watermark=1))
    assert isinstance(refusal[b"1"], CapacityError)
    errors = told(reducer.contribute(1, sequence=1, watermark=1))
    assert errors[b"0"].rank == 1


def test_a_chunk_larger_than_the_settings_allow_is_refused(reducer: Reducer) -> None:
    errors = told(reducer.contribute(0, payload=bytes((1 << 20) + 4)))
    assert isinstance(errors[b"0"], RemoteProtocolError)


def test_errors_that_are_kept_hold_no_payload(reducer: Reducer) -> None:
    reducer.engine.unreachable(b"1")
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


@pytest.mark.parametrize("change", [{"job": 1}, {"generation": 1}, {"epoch": 1}, {"rank": 0}])
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
    )
    assert [Header.unpack(send.header) for send in sends] == [expected, expected]


def test_a_worker_sends_no_results(reducer: Reducer) -> None:
    reducer.contribute(0)
    sends = reducer.contribute(1, type=M.RESULT)
    assert isinstance(told(sends)[b"1"], RemoteProtocolError)
    assert len(reducer.contribute(1)) == 2
