"""The worker's rules one by one."""

import pytest

from reducer.errors import (
    MembershipError,
    MismatchError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
    RemoteProtocolError,
    StaleGenerationError,
    VersionError,
)
from reducer.wire.constants import MAX_ROUNDS_AHEAD, PLACES, DType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.layout import MEASURED_BYTES
from reducer.wire.messages import Loss, Stragglers, decode, encode
from tests.engine.driven import Driven, M, error, errors, join, joined, operation, result, sent
from tests.engine.words import number
from worker_client.protocol.flight import Connect, Reset, Send
from worker_client.protocol.joining import RETRY_S
from worker_client.protocol.lifecycle import GRACE_S
from worker_client.protocol.operation import LAST_S


def test_contributions_start_at_another_reducer_for_every_rank(session):
    links = [link for link, _ in sent(session.submit(operation(), 0.0), M.CONTRIBUTION)]
    assert links == [1, 0, 1, 0]  # rank 1 of 2; every reducer has work before any has more


def test_only_a_large_all_reduce_is_measured_until_it_ends():
    session = joined(0, 2, ("a:1",), 0, MEASURED_BYTES // 8)
    small = MEASURED_BYTES - 64
    windows = [session.flight.stats(0).window]
    for call, (nbytes, answered) in enumerate(
        [(small, 1), (MEASURED_BYTES, 0), (small, 1), (MEASURED_BYTES, 1)]
    ):
        now = 10.0 * call
        contributions = sent(session.submit(operation(nbytes), now), M.CONTRIBUTION)
        for link, header in contributions[:answered]:
            frame = header._replace(type=M.RESULT, watermark=0).pack()
            session.session.receive(link, frame, bytes(header.nbytes), now + 1.0)
        session.tick(now + 1.0)
        windows.append(session.flight.stats(0).window)
        error(session, 0, RankLostError("gone", rank=0), number(call))
    assert len(set(windows[:-1])) == 1
    assert windows[-1] > windows[0]
    # Its last result ends it, at a rate that is ten times as high.
    for link, header in sent(session.submit(operation(MEASURED_BYTES), 50.0), M.CONTRIBUTION):
        frame = header._replace(type=M.RESULT, watermark=0).pack()
        session.session.receive(link, frame, bytes(header.nbytes), 50.01)
    assert session.flight.stats(0).window > windows[-1]


def test_a_late_result_is_dropped(session):
    mine = operation()
    contributions = sent(session.submit(mine, 0.0), M.CONTRIBUTION)
    error(session, 0, RankLostError("gone", rank=0), number(0))
    assert result(session, *contributions[0]) == []
    assert bytes(mine.view) == bytes(256)


@pytest.mark.parametrize("change", [{"total_bytes": 512}, {"op": ReduceOp.MAX}, {"nbytes": 32}])
def test_a_result_that_does_not_fit_is_an_error(lone, change):
    link, header = sent(lone.submit(operation(), 0.0), M.CONTRIBUTION)[0]
    actions = result(lone, link, header._replace(**change))
    (failure,) = errors(actions)
    assert isinstance(failure, RemoteProtocolError)
    assert Reset(0) in actions


def test_ranks_that_call_it_differently_hear_the_callers_name(lone):
    mine = operation(name="loss")
    lone.submit(mine, 0.0)
    tags = {"expected": f"#{mine.tag:016x}", "got": "#1"}
    differs = MismatchError("by tags", field="name", rank=0, other_rank=1, **tags)
    (failure,) = errors(error(lone, 0, differs, number(0)))
    assert (failure.expected, failure.got) == ("loss", "#1")


def test_a_deadline_asks_who_is_missing(session):
    session.submit(operation(timeout_s=5.0), 0.0)
    assert session.flight.earliest == 5.0
    assert session.tick(5.0 - LAST_S - 0.1) == []
    assert {link for link, _ in sent(session.tick(5.0 - LAST_S), M.STRAGGLERS)} == {0, 1}
    assert session.tick(4.9) == []
    asked = session.tick(5.0)
    assert {link for link, _ in sent(asked, M.ABORT)} == {0, 1}
    assert error(session, 0, ReductionTimeout("who knows"), number(0)) == []  # b may know
    named = ReductionTimeout("rank 0", missing=(0,))
    (failure,) = errors(error(session, 1, named, number(0)))
    assert failure.missing == (0,)


@pytest.mark.parametrize("timeout_s", [5.0, 0.5])
def test_who_is_missing_is_known_before_the_deadline(session, timeout_s):
    """A slow link may not bring the answer in time that is asked for at the deadline."""
    session.submit(operation(timeout_s=timeout_s), 0.0)
    asked = session.tick(timeout_s - min(LAST_S, timeout_s / 2))
    link, header = sent(asked, M.STRAGGLERS)[0]
    session.receive(link, header.pack(), encode(Stragglers((0,))))
    session.tick(timeout_s)
    (failure,) = errors(session.tick(timeout_s + GRACE_S))
    assert failure.missing == (0,)
    assert "waiting for rank 0" in str(failure)


def test_each_call_is_asked_about_before_its_own_deadline(session):
    session.submit(operation(64, timeout_s=300.0), 0.0)
    session.submit(operation(64, timeout_s=5.0), 0.0)

    def asked(now):
        return {header.sequence for _, header in sent(session.tick(now), M.STRAGGLERS)}

    assert asked(5.0 - LAST_S) == {number(1)}
    assert [asked(at) for at in (10.0, 20.0, 40.0, 80.0, 160.0)] == [{number(0)}] * 5
    header = Header(M.STRAGGLERS, sequence=number(0)).pack()
    session.receive(0, header, encode(Stragglers((0,))))
    assert asked(300.0 - LAST_S) == {number(0)}
    session.tick(300.0)
    (failure,) = errors(session.tick(300.0 + GRACE_S))
    assert failure.missing == (), "what a reducer said 140 s ago names nobody"


def test_the_last_reducer_that_is_lost_fails_everything(lone):
    lone.submit(operation(), 0.0)
    lone.submit(operation(1), 0.0)
    actions = lone.disconnected(0, "died")
    failures = errors(actions)
    assert [failure.sequence for failure in failures] == [0, 1]
    assert all(isinstance(failure, ReducerLostError) for failure in failures)
    assert {failure.reducer for failure in failures} == {"a:1"}
    assert lone.active == 0
    for _ in range(3):
        (failure,) = errors(lone.submit(operation(), 0.0))
        assert isinstance(failure, ReducerLostError)
        failures.append(failure)
    for failure in failures:
        assert str(failure).startswith("reducer a:1 died, and no reducer is left: set REDUCTION_")
        for remedy in ("REDUCTION_WAIT_FOR_REDUCERS", "REDUCTION_FALLBACK=process-group"):
            assert str(failure).count(remedy) == 1
    told = join(lone, 0)  # it is back, and learns what failed meanwhile
    assert [header.type for _, header in sent(told)] == [M.SHARD_MAP, *[M.ABORT] * 4]
    aborts = [(abort.sequence, abort.nbytes) for _, abort in sent(told, M.ABORT)]
    # The first that failed, and how many more with it; then each.
    assert aborts == [(0, number(1)), (number(2), 0), (number(3), 0), (number(4), 0)]
    assert len(sent(lone.submit(operation(), 0.0), M.CONTRIBUTION)) == 4


def test_a_last_reducer_that_shuts_down_is_used_for_as_long_as_it_serves(lone):
    contributions = sent(lone.submit(operation(), 0.0), M.CONTRIBUTION)
    assert lone.receive(0, Header(M.GOODBYE).pack(), b"") == []
    for link, header in contributions:
        actions = result(lone, link, header)
    assert errors(actions) == [None]
    assert sent(lone.submit(operation(), 0.0), M.CONTRIBUTION)
    (failure,) = errors(lone.disconnected(0, "has ended"))
    assert "has ended" in str(failure)


def test_a_refusal_is_kept(newcomer):
    newcomer.connected(0)
    data = bytearray(Header(M.WELCOME).pack())
    data[4] = 7  # another major version
    newcomer.receive(0, data, b"")
    assert isinstance(newcomer.refusal, VersionError)
    newcomer.connected(0)
    assert newcomer.refusal is None
    error(newcomer, 0, MembershipError("no"))
    assert isinstance(newcomer.refusal, MembershipError)
    newcomer.connected(0)
    newcomer.receive(0, Header(M.RESULT).pack(), b"")  # before the WELCOME
    assert isinstance(newcomer.refusal, RemoteProtocolError)
    assert isinstance(errors(newcomer.submit(operation(), 0.0))[0], RemoteProtocolError)
    assert not newcomer.joined


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_does_not_begin_without_a_reducer_that_refuses_it(refused):
    session = Driven(0, 2, ("a:1", "b:2"), 8192, begin_without_s=3.0)
    join(session, 0)
    session.connected(1)
    if refused:  # it knows another process of this rank, and the other reducer was restarted
        error(session, 1, StaleGenerationError("another run", generation=0, current=0))
    for now in (1.0, 3.9):
        session.tick(now)
        assert not session.joined
    session.tick(4.1)
    assert session.joined == (not refused)
    if refused:
        join(session, 1)
        assert session.joined


def test_no_rank_begins_without_a_reducer_that_a_rank_hosts():
    addresses, hosts = ("pool:1", "a:1", "b:2"), {1: 0, 2: 1}
    session = Driven(0, 2, addresses, 8192, begin_without_s=3.0, hosts=hosts)
    join(session, 1)
    session.tick(1.0)
    assert losses_told(session.tick(4.1)) == [(1, 0)], "the pool's is late as well"
    assert session.tick(99.0) == []
    assert not session.joined
    join(session, 2)
    assert session.joined


def losses_told(actions):
    """(link, reducer) of what a session says is lost."""
    told = [one for one in actions if isinstance(one, Send)]
    kinds = [(one, Header.unpack(one.header).type) for one in told]
    return [(one.link, decode(Loss, one.payload).reducer) for one, k in kinds if k is M.SHARD_MAP]


def test_who_hears_that_the_last_late_reducer_is_lost_has_begun():
    session = Driven(0, 2, ("a:1", "b:2", "c:3"), 8192, begin_without_s=3.0)
    join(session, 0)
    join(session, 1)
    session.receive(0, Header(M.SHARD_MAP).pack(), encode(Loss(2, 0)))
    assert session.joined
    session.submit(operation(), 0.0)
    session.disconnected(0, "died")
    assert session.failover.map.used() == [1]


@pytest.mark.parametrize("late", [False, True])
def test_ranks_cut_alike_whether_they_know_all_lanes_or_not(late):
    ranks = [Driven(r, 2, ("a:1", "b:2"), 1 << 20, 64, begin_without_s=3.0) for r in range(2)]
    for session in ranks:
        join(session, 0)
        session.tick(1.0)
    knows, lacks = ranks
    join(knows, 1, lanes=(7,))
    join(knows, 2)
    assert losses_told(lacks.tick(4.1)) == [(0, 1)]
    if late:
        (connect,) = [a for a in join(lacks, 1, lanes=(7,)) if isinstance(a, Connect)]
        assert connect.endpoint == "b:7"
        join(lacks, 2)
        assert knows.failover.usable_lanes() == lacks.failover.usable_lanes() == [1, 2]
    cuts = [session.plan.cut(1024, PLACES + 1, DType.UINT8) for session in ranks]
    assert cuts[0] == cuts[1]
    for session in ranks:
        session.failover.agree([1, 1 + late], 0)
    cuts = [session.plan.cut(1024, 2 * PLACES + 1, DType.UINT8) for session in ranks]
    assert cuts[0] == cuts[1]
    assert len(cuts[0][0]) == 2 + late


def test_closing_says_goodbye_and_ends_everything(session):
    session.submit(operation(), 0.0)
    actions = session.close(RankLostError("closing", rank=1))
    assert {link for link, _ in sent(actions, M.GOODBYE)} == {0, 1}
    assert [type(failure) for failure in errors(actions)] == [RankLostError]
    assert session.active == 0


def test_a_connection_made_anew_has_lost_what_the_old_one_carried(session):
    first = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)
    actions = session.connected(1)
    assert errors(actions) == []
    assert [action for action in actions if isinstance(action, Reset)] == [Reset(1)]
    assert {link for link, _ in sent(actions)} == {0}  # no HELLO: that one is closed as well
    for at in [header for link, header in first if link == 0]:
        ((link, _),) = sent(result(session, 0, at), M.CONTRIBUTION)
        assert link == 0


def test_a_window_freed_by_a_deadline_is_used_at_once(session):
    session.submit(operation(64 * 12, timeout_s=5.0), 0.0)  # fills both windows
    assert sent(session.submit(operation(64), 0.0), M.CONTRIBUTION) == []
    session.tick(5.0)
    actions = session.tick(5.0 + GRACE_S)
    assert [header.sequence for _, header in sent(actions, M.CONTRIBUTION)] == [number(1)]


def test_too_far_ahead_nothing_is_said(lone):
    first = sent(lone.submit(operation(1), 0.0), M.CONTRIBUTION)
    # One after the other: only the first is not answered.
    for _ in range(MAX_ROUNDS_AHEAD // PLACES - 1):
        (contribution,) = sent(lone.submit(operation(1), 0.0), M.CONTRIBUTION)
        assert errors(result(lone, *contribution)) == [None]
    actions = lone.submit(operation(1, timeout_s=1.0), 0.0)
    assert actions == []
    (failure, *sends) = lone.tick(1.0)
    assert isinstance(failure.error, ReductionTimeout)
    assert sends == []
    assert lone.submit(operation(1), 0.0) == []
    actions = result(lone, *first[0])
    assert errors(actions) == [None]
    assert len(sent(actions, M.CONTRIBUTION)) == 1  # now it may be


def test_who_was_refused_asks_again(lone):
    lone.disconnected(0, "died")
    lone.connected(0)
    error(lone, 0, MembershipError("no"))
    assert isinstance(errors(lone.submit(operation(), 0.0))[0], MembershipError)
    assert Reset(0) not in lone.tick(0.5 * RETRY_S)
    assert Reset(0) in lone.tick(RETRY_S)
    assert Reset(0) not in lone.tick(2 * RETRY_S), "once"
