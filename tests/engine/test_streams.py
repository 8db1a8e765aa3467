"""Links of several connections: STREAM."""

from __future__ import annotations

import pytest

from reducer.engine.engine import AWAY_S
from reducer.engine.limits import Limits
from reducer.errors import (
    AuthError,
    CapacityError,
    MembershipError,
    RankLostError,
    ReductionError,
    RemoteProtocolError,
)
from reducer.wire.constants import MAX_STREAMS, Feature
from reducer.wire.header import Header
from reducer.wire.messages import Hello, Stream, Welcome, decode, encode
from tests.engine.driven import Driven, joined
from tests.engine.words import TWO_KEYS, M, Reducer, kinds, lost_rank, told
from worker_client.protocol.flight import AddStreams
from worker_client.protocol.joining import auto_streams

BOTH = Feature.CREDIT | Feature.STREAMS


def join(reducer: Reducer, rank: int, key: str = "", features: int = BOTH, **change) -> str:
    """Join; return the ticket that the reducer has given."""
    sends = reducer.hello(rank, key, features=features, **change)
    (welcome,) = (send for send in sends if kinds([send]) == [M.WELCOME])
    return decode(Welcome, welcome.payload).ticket


def stream(reducer: Reducer, peer: bytes, ticket: str, key: str = "") -> list:
    body = encode(Stream(ticket))
    return reducer.served.receive(peer, Header(M.STREAM).pack(), body, key)


def refusal(sends: list, peer: bytes) -> ReductionError:
    error = told(sends)[peer]
    assert isinstance(error, ReductionError)
    return error


@pytest.fixture
def two(implementation: str) -> tuple[Reducer, str]:
    """A reducer of two ranks, and the ticket of rank 0."""
    reducer = Reducer(implementation)
    ticket = join(reducer, 0)
    join(reducer, 1)
    return reducer, ticket


@pytest.mark.parametrize("features", [0, Feature.CREDIT])
def test_who_does_not_ask_gets_no_ticket(implementation: str, features: int) -> None:
    assert join(Reducer(implementation), 0, features=features) == ""


def test_contributions_count_over_any_stream(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    (answer,) = stream(reducer, b"0b", ticket)
    assert (answer.peer, kinds([answer])) == (b"0b", [M.STREAM])
    assert reducer.engine.newly_tied() in ([(b"0b", b"0")], [])  # the compiled loop has asked
    assert reducer.engine.streams(b"0") == (b"0b",)
    reducer.served.taken = 0
    for sequence, peer in enumerate([b"0b", b"0", b"0b"], 1):
        assert reducer.contribute(0, sequence, 1.0, peer=peer) == []
        results = reducer.contribute(1, sequence, 2.0)
        # They are sent to the member: over which of its connections, the loop decides.
        assert sorted(send.peer for send in results) == [b"0", b"1"]
    assert reducer.contribute(0, 3, 1.0, peer=b"0") == [], "it was here already"
    assert reducer.engine.counters.duplicates == 1
    assert reducer.served.taken in {0, 6}, "in the compiled loop, streams are healthy too"


def test_a_ticket_is_good_while_its_member_is_here(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    unknown = refusal(stream(reducer, b"x", "0" * 32), b"x")
    assert isinstance(unknown, MembershipError)
    reducer.say(0, M.GOODBYE, (1 << 64) - 1)
    assert isinstance(refusal(stream(reducer, b"y", ticket), b"y"), MembershipError)
    assert reducer.engine.streams(b"0") == ()


@pytest.mark.parametrize("later", [0, 1])
def test_a_link_that_begins_anew_gives_another_ticket(implementation: str, later: int) -> None:
    reducer = Reducer(implementation)
    first = join(reducer, 0)
    stream(reducer, b"0b", first)
    if later == 0:
        reducer.engine.unreachable(b"0")
    second = join(reducer, 0, peer=b"0c", generation=later)
    assert second != first
    assert isinstance(refusal(stream(reducer, b"x", first), b"x"), MembershipError)
    assert kinds(stream(reducer, b"y", second)) == [M.STREAM]
    assert reducer.engine.streams(b"0c") == (b"y",)


def test_who_loses_one_stream_has_lost_the_link(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    reducer.contribute(1, 1)
    assert reducer.engine.unreachable(b"0b") == []
    reducer.now += AWAY_S
    assert lost_rank(reducer.tick(), b"1") == 0
    assert reducer.engine.unreachable(b"0") == [], "the transport ends the others"


def test_who_breaks_the_protocol_does_so_with_all_streams(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    reducer.contribute(1, 1)
    broken = stream(reducer, b"0b", ticket)
    assert isinstance(refusal(broken, b"0"), RemoteProtocolError)
    assert isinstance(refusal(broken, b"1"), RankLostError)
    assert reducer.engine.newly_dropped() == [b"0"]
    for peer in (b"0", b"0b"):
        assert reducer.contribute(0, 2, peer=peer) == []
    assert reducer.engine.counters.ignored == 2


def test_who_waits_for_a_rank_is_no_stream_of_another(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    assert kinds(reducer.hello(1, peer=b"1b", features=BOTH)) == [M.PING], "the holder is asked"
    assert isinstance(refusal(stream(reducer, b"1b", ticket), b"1b"), RemoteProtocolError)
    assert reducer.engine.streams(b"0") == ()
    assert reducer.engine.newly_dropped() == [b"1b"]


def test_a_link_has_so_many_connections_and_no_more(two: tuple[Reducer, str]) -> None:
    reducer, ticket = two
    for number in range(1, MAX_STREAMS):
        assert kinds(stream(reducer, b"0.%d" % number, ticket)) == [M.STREAM]
    error = refusal(stream(reducer, b"x", ticket), b"x")
    assert isinstance(error, CapacityError)
    assert (error.limit, "REDUCTION_STREAMS" in str(error)) == ("max_streams", True)
    assert len(reducer.engine.streams(b"0")) == MAX_STREAMS - 1


def test_a_stream_shows_the_key_of_its_link(implementation: str) -> None:
    reducer = Reducer(implementation)
    reducer.engine.allow(TWO_KEYS)
    ticket = join(reducer, 0, "key-1")
    assert isinstance(refusal(stream(reducer, b"x", ticket, "key-2"), b"x"), AuthError)
    assert kinds(stream(reducer, b"y", ticket, "key-1")) == [M.STREAM]


def test_streams_count_as_connections_of_their_key(implementation: str) -> None:
    reducer = Reducer(implementation, limits=Limits(max_connections_per_key=3))
    reducer.engine.allow(TWO_KEYS)
    ticket = join(reducer, 0, "key-1")
    for peer in (b"0b", b"0c"):
        assert kinds(stream(reducer, peer, ticket, "key-1")) == [M.STREAM]
    error = refusal(stream(reducer, b"0d", ticket, "key-1"), b"0d")
    assert isinstance(error, CapacityError)
    assert error.limit == "max_connections_per_key"
    assert kinds(reducer.hello(1, "key-1")) == [M.ERROR]
    reducer.lose(b"0")
    assert kinds(reducer.hello(1, "key-1", b"again")) == [M.WELCOME]


@pytest.mark.parametrize("later", [1, 2])
def test_those_of_an_ended_generation_are_no_longer_counted(
    implementation: str, later: int
) -> None:
    reducer = Reducer(implementation, limits=Limits(max_connections_per_key=3))
    reducer.engine.allow(TWO_KEYS)
    for generation in range(later + 1):
        peer = b"%d" % generation
        ticket = join(reducer, 0, "key-1", peer=peer, generation=generation)
        for name in (b"b", b"c"):
            assert kinds(stream(reducer, peer + name, ticket, "key-1")) == [M.STREAM]


# -- the worker -------------------------------------------------------------------------------


def added(session: Driven, round_trip_s: float, ticket: str) -> list[AddStreams]:
    (hello,) = session.session.connected(0, round_trip_s)
    welcome = Header(M.WELCOME, window=Header.unpack(hello.header).window).pack()
    body = encode(Welcome(incarnation="1", ticket=ticket))
    actions = session.receive(0, welcome, body)
    return [action for action in actions if isinstance(action, AddStreams)]


@pytest.mark.parametrize(
    ("round_trip_s", "streams"),
    [(0.0, 1), (0.0001, 1), (0.0249, 1), (0.0251, 2), (0.1, 5), (0.2, 8), (3.0, 8)],
)
def test_each_25_ms_of_the_round_trip_bring_another_one(
    implementation: str, round_trip_s: float, streams: int
) -> None:
    assert auto_streams(round_trip_s) == streams
    session = Driven(implementation, 0, 2, ("a:1",), 0, streams=0)
    actions = added(session, round_trip_s, "a" * 32)
    assert [action.streams for action in actions] == ([streams - 1] if streams > 1 else [])
    for action in actions:
        assert Header.unpack(action.header).type is M.STREAM
        assert decode(Stream, action.payload).ticket == "a" * 32


@pytest.mark.parametrize(
    ("asked", "ticket", "expected"), [(3, "b" * 32, [2]), (3, "", []), (1, "b" * 32, [])]
)
def test_what_was_asked_for_is_made_where_the_reducer_can(
    implementation: str, asked: int, ticket: str, expected: list[int]
) -> None:
    session = Driven(implementation, 0, 2, ("a:1",), 0, streams=asked)
    assert [action.streams for action in added(session, 0.2, ticket)] == expected


def test_a_worker_announces_them_if_it_may_have_some(implementation: str) -> None:
    for streams, announced in ((1, False), (0, True), (2, True)):
        session = Driven(implementation, 0, 2, ("a:1",), 0, streams=streams)
        (hello,) = session.session.connected(0, 0.0)
        features = decode(Hello, hello.payload).features
        assert bool(features & Feature.STREAMS) == announced


def test_a_reducer_does_not_say_stream_over_a_links_first_connection(implementation: str) -> None:
    session = joined(implementation, 0, 2, ("a:1", "b:2"), 0)
    session.receive(0, Header(M.STREAM).pack(), b"")
    assert not session.links[0].member
