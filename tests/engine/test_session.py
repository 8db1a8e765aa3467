"""The worker's rules one by one."""

from __future__ import annotations

from typing import Any

import pytest

from reducer.errors import (
    MembershipError,
    RankLostError,
    ReducerLostError,
    ReductionTimeout,
    RemoteProtocolError,
    VersionError,
)
from reducer.wire.constants import MAX_ROUNDS_AHEAD, DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.messages import Welcome, encode, encode_error
from tests.engine import twins
from worker_client.operation import Operation
from worker_client.session import GRACE_S, Finish, Send
from worker_client.settings import Settings

M = MessageType


class Driven:
    """A session whose actions are followed by what its flight then sends, as the client does."""

    def __init__(self, implementation: str, *settings: Any) -> None:
        self.session = twins.session(implementation, Settings("job", 0, *settings))
        self.flight = self.session.flight
        self.links = self.session.links

    def __getattr__(self, name: str) -> Any:
        event = getattr(self.session, name)
        if name not in {"connected", "disconnected", "submit", "tick", "close"}:
            return event
        return lambda *arguments: event(*arguments) + self.flight.refill(0.0)

    def receive(self, index: int, frame: Any, payload: bytes) -> list:
        return self.session.receive(index, frame, payload, 0.0) + self.flight.refill(0.0)

    def in_flight(self, index: int) -> int:
        return self.flight.stats(index).in_flight


def join(session: Driven, index: int) -> list:
    (hello,) = session.connected(index)
    window = Header.unpack(hello.header).window
    welcome = Header(M.WELCOME, window=window).pack()
    return session.receive(index, welcome, encode(Welcome(incarnation="1")))


@pytest.fixture(params=twins.IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(implementation: str) -> Driven:
    """Rank 1 of 2, with two reducers and chunks of 64 bytes."""
    session = Driven(implementation, 1, 2, ("a:1", "b:2"), 4096, 64)
    assert not session.joined
    for index in range(2):
        assert join(session, index) == []
    assert session.joined
    return session


@pytest.fixture
def newcomer(implementation: str) -> Driven:
    """The only rank, which has one reducer and has not joined."""
    return Driven(implementation, 0, 1, ("a:1",), 4096)


def operation(nbytes: int = 256, timeout_s: float = 10.0) -> Operation:
    return Operation(memoryview(bytearray(nbytes)), DType.UINT8, ReduceOp.SUM, "it", timeout_s)


def sent(actions: list, kind: MessageType) -> list[tuple[int, Header]]:
    """Messages of one kind, as (link, header)."""
    headers = [(a.link, Header.unpack(a.header)) for a in actions if isinstance(a, Send)]
    return [(link, header) for link, header in headers if header.type is kind]


def errors(actions: list) -> list:
    return [action.error for action in actions if isinstance(action, Finish)]


def result(session: Driven, link: int, contribution: Header) -> list:
    header = contribution._replace(type=M.RESULT, rank=0, watermark=0)
    return session.receive(link, header.pack(), b"\7" * contribution.nbytes)


def error(session: Driven, link: int, failure: Exception, sequence: int = (1 << 64) - 1) -> list:
    frame = Header(M.ERROR, sequence=sequence).pack()
    return session.receive(link, frame, encode_error(failure))


def test_contributions_start_at_another_reducer_for_every_rank(session: Driven) -> None:
    links = [link for link, _ in sent(session.submit(operation(), 0.0), M.CONTRIBUTION)]
    assert links == [1, 0, 1, 0]  # rank 1 of 2; every reducer has work before any has more


def test_results_replace_the_buffer_and_refill_the_window(session: Driven) -> None:
    mine = operation(64 * 12)
    first = sent(session.submit(mine, 0.0), M.CONTRIBUTION)
    assert len(first) == 4  # two in flight per reducer: 4096 bytes, of which each takes 1024
    waiting = first
    while waiting:
        link, header = waiting.pop(0)
        actions = result(session, link, header)
        waiting += sent(actions, M.CONTRIBUTION)
    assert errors(actions) == [None]
    assert bytes(mine.view) == b"\7" * (64 * 12)
    assert session.watermark == 1


def test_the_watermark_is_the_first_unfinished(session: Driven) -> None:
    (one,) = sent(session.submit(operation(1), 0.0), M.CONTRIBUTION)
    (two,) = sent(session.submit(operation(1), 0.0), M.CONTRIBUTION)
    result(session, *two)
    assert session.watermark == 0
    result(session, *one)
    assert session.watermark == 2


def test_a_failure_is_passed_to_the_other_reducers(session: Driven) -> None:
    session.submit(operation(), 0.0)
    actions = error(session, 0, RankLostError("gone", rank=0), sequence=0)
    (failure,) = errors(actions)
    assert (type(failure), failure.rank, failure.sequence, failure.name) == (
        RankLostError,
        0,
        0,
        "it",
    )
    assert [(link, h.sequence) for link, h in sent(actions, M.ABORT)] == [(1, 0)]
    assert [session.in_flight(link) for link in range(2)] == [0, 0]


def test_a_late_result_is_dropped(session: Driven) -> None:
    mine = operation()
    contributions = sent(session.submit(mine, 0.0), M.CONTRIBUTION)
    error(session, 0, RankLostError("gone", rank=0), sequence=0)
    assert result(session, *contributions[0]) == []
    assert bytes(mine.view) == bytes(256)


@pytest.mark.parametrize("change", [{"total_bytes": 512}, {"op": ReduceOp.MAX}, {"nbytes": 32}])
def test_a_result_that_does_not_fit_is_an_error(session: Driven, change: dict) -> None:
    link, header = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)[0]
    (failure,) = errors(result(session, link, header._replace(**change)))
    assert isinstance(failure, RemoteProtocolError)


def test_a_deadline_asks_who_is_missing(session: Driven) -> None:
    session.submit(operation(timeout_s=5.0), 0.0)
    assert session.next_deadline() == 5.0
    assert session.tick(4.9) == []
    asked = session.tick(5.0)
    assert {link for link, _ in sent(asked, M.ABORT)} == {0, 1}
    assert error(session, 0, ReductionTimeout("who knows"), sequence=0) == []  # b may know
    named = ReductionTimeout("rank 0", missing=(0,))
    (failure,) = errors(error(session, 1, named, sequence=0))
    assert failure.missing == (0,)


def test_a_deadline_passes_without_an_answer(session: Driven) -> None:
    session.submit(operation(timeout_s=5.0), 0.0)
    session.tick(5.0)
    assert session.tick(5.0 + GRACE_S - 0.1) == []
    (failure,) = errors(session.tick(5.0 + GRACE_S))
    assert isinstance(failure, ReductionTimeout)
    assert failure.missing == ()
    assert session.active == 0


def test_a_lost_reducer_fails_what_needs_it(session: Driven) -> None:
    session.submit(operation(), 0.0)
    session.submit(operation(1), 0.0)  # needs the second reducer alone
    session.submit(operation(1), 0.0)  # needs the first one alone
    failures = errors(session.disconnected(1, "died"))
    assert [failure.sequence for failure in failures] == [0, 1]
    assert all(isinstance(failure, ReducerLostError) for failure in failures)
    assert {failure.reducer for failure in failures} == {"b:2"}
    assert session.active == 1
    (failure,) = errors(session.submit(operation(), 0.0))
    assert isinstance(failure, ReducerLostError)
    told = sent(join(session, 1), M.ABORT)  # it is back, and learns what failed meanwhile
    assert [(link, header.sequence) for link, header in told] == [(1, 3)]  # others are past
    assert len(sent(session.submit(operation(), 0.0), M.CONTRIBUTION)) >= 2


def test_a_draining_reducer_gets_no_new_work(session: Driven) -> None:
    contributions = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)
    session.receive(0, Header(M.GOODBYE).pack(), b"")
    (failure,) = errors(session.submit(operation(), 0.0))
    assert "is shutting down" in str(failure)
    for link, header in contributions:
        actions = result(session, link, header)
    assert errors(actions) == [None]


def test_an_unknown_peer_fails_everything_in_flight(session: Driven) -> None:
    session.submit(operation(), 0.0)
    session.submit(operation(), 0.0)
    failures = errors(error(session, 0, MembershipError("I do not know you")))
    assert [failure.sequence for failure in failures] == [0, 1]


def test_a_refusal_is_kept(newcomer: Driven) -> None:
    session = newcomer
    session.connected(0)
    data = bytearray(Header(M.WELCOME).pack())
    data[4] = 7  # another major version
    session.receive(0, data, b"")
    assert isinstance(session.refusal, VersionError)
    session.connected(0)
    assert session.refusal is None
    error(session, 0, MembershipError("no"))
    assert isinstance(session.refusal, MembershipError)
    assert not session.joined


def test_closing_says_goodbye_and_ends_everything(session: Driven) -> None:
    session.submit(operation(), 0.0)
    actions = session.close(RankLostError("closing", rank=1))
    assert {link for link, _ in sent(actions, M.GOODBYE)} == {0, 1}
    assert [type(failure) for failure in errors(actions)] == [RankLostError]
    assert session.active == 0


def test_a_connection_made_anew_fails_what_the_old_one_carried(session: Driven) -> None:
    session.submit(operation(), 0.0)
    actions = session.connected(1)
    (failure,) = errors(actions)
    assert isinstance(failure, ReducerLostError)
    assert [link for link, _ in sent(actions, M.ABORT)] == [0]
    assert [link for link, _ in sent(actions, M.HELLO)] == [1]


def test_what_failed_while_a_reducer_was_away_is_told_no_longer_than_needed(
    session: Driven,
) -> None:
    session.disconnected(1, "died")
    for _ in range(5):  # each fails at once, and the watermark passes it
        assert isinstance(errors(session.submit(operation(), 0.0))[0], ReducerLostError)
    assert len(session.links[1].owed) <= 1


def test_a_window_freed_by_a_deadline_is_used_at_once(session: Driven) -> None:
    session.submit(operation(64 * 12, timeout_s=5.0), 0.0)  # fills both windows
    assert sent(session.submit(operation(64), 0.0), M.CONTRIBUTION) == []
    session.tick(5.0)
    actions = session.tick(5.0 + GRACE_S)
    assert [header.sequence for _, header in sent(actions, M.CONTRIBUTION)] == [1]


def test_a_repeated_result_counts_once(session: Driven) -> None:
    contributions = sent(session.submit(operation(), 0.0), M.CONTRIBUTION)
    for _ in range(4):
        assert errors(result(session, *contributions[0])) == []
    assert session.in_flight(1) == 1024
    assert session.in_flight(0) == 2048


def test_too_far_ahead_nothing_is_said(session: Driven) -> None:
    first = sent(session.submit(operation(1), 0.0), M.CONTRIBUTION)
    for _ in range(MAX_ROUNDS_AHEAD - 1):  # one after the other: only the first is not answered
        (contribution,) = sent(session.submit(operation(1), 0.0), M.CONTRIBUTION)
        assert errors(result(session, *contribution)) == [None]
    actions = session.submit(operation(1, timeout_s=1.0), 0.0)
    assert actions == []
    (failure, *sends) = session.tick(1.0)
    assert isinstance(failure.error, ReductionTimeout)
    assert sends == []
    assert session.submit(operation(1), 0.0) == []
    actions = result(session, *first[0])
    assert errors(actions) == [None]
    assert len(sent(actions, M.CONTRIBUTION)) == 1  # now it may be


def test_a_result_before_the_welcome_refuses_the_reducer(newcomer: Driven) -> None:
    session = newcomer
    session.connected(0)
    session.receive(0, Header(M.RESULT).pack(), b"")
    assert isinstance(session.refusal, RemoteProtocolError)
    (failure,) = errors(session.submit(operation(), 0.0))
    assert isinstance(failure, RemoteProtocolError)
