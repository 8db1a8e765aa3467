"""Links of several connections: STREAM."""

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
from reducer.wire import authentication
from reducer.wire.constants import MAX_STREAMS, Feature
from reducer.wire.header import Header, fingerprint
from reducer.wire.messages import Hello, Stream, Welcome, decode, encode
from tests.engine.driven import Driven, joined
from tests.engine.words import TWO_KEYS, WINDOW, M, Reducer, kinds, lost_rank, number, told
from worker_client.protocol.flight import AddStreams, Reset
from worker_client.protocol.joining import auto_streams

BOTH = Feature.CREDIT | Feature.STREAMS


def join(reducer, rank, key="", features=BOTH, **change):
    """Join; return the ticket that the reducer has given."""
    sends = reducer.hello(rank, key, features=features, **change)
    (welcome,) = (send for send in sends if kinds([send]) == [M.WELCOME])
    return decode(Welcome, welcome.payload).ticket


def stream(reducer, peer, ticket, key="", *, at=1):
    return say(reducer, peer, Stream(ticket, at), key)


def say(reducer, peer, body, key=""):
    return reducer.served.receive(peer, Header(M.STREAM).pack(), encode(body), key)


def refusal(sends, peer):
    error = told(sends)[peer]
    assert isinstance(error, ReductionError)
    return error


@pytest.fixture
def two(implementation):
    """A reducer of two ranks, and the ticket of rank 0."""
    reducer = Reducer(implementation)
    ticket = join(reducer, 0)
    join(reducer, 1)
    return reducer, ticket


@pytest.mark.parametrize("features", [0, Feature.CREDIT])
def test_who_does_not_ask_gets_no_ticket(implementation, features):
    assert join(Reducer(implementation), 0, features=features) == ""


def test_contributions_count_over_any_stream(two):
    reducer, ticket = two
    (answer,) = stream(reducer, b"0b", ticket)
    assert (answer.peer, kinds([answer])) == (b"0b", [M.STREAM])
    reducer.served.taken = 0
    assert reducer.engine.streams(b"0") == (b"0b",)
    for sequence, peer in enumerate([b"0b", b"0", b"0b"], 1):
        assert reducer.contribute(0, sequence, 1.0, peer=peer) == []
        results = reducer.contribute(1, sequence, 2.0)
        # They are sent to the member: over which of its connections, the loop decides.
        assert sorted(send.peer for send in results) == [b"0", b"1"]
    assert reducer.contribute(0, 3, 1.0, peer=b"0") == [], "it was here already"
    assert reducer.engine.counters.duplicates == 1
    assert reducer.served.taken in {0, 6}, "in the compiled loop, streams are healthy too"


def test_a_ticket_is_good_while_its_member_is_here(two):
    reducer, ticket = two
    unknown = refusal(stream(reducer, b"x", "0" * 32), b"x")
    assert isinstance(unknown, MembershipError)
    reducer.say(0, M.GOODBYE, (1 << 64) - 1)
    assert isinstance(refusal(stream(reducer, b"y", ticket), b"y"), MembershipError)
    assert reducer.engine.streams(b"0") == ()


@pytest.mark.parametrize("later", [0, 1])
def test_a_link_that_begins_anew_gives_another_ticket(implementation, later):
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


@pytest.mark.parametrize("first_too", [False, True])
def test_who_loses_one_stream_has_lost_the_link(two, first_too):
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    reducer.contribute(1, 1)
    assert reducer.engine.unreachable(b"0b") == []
    (job,) = reducer.engine.jobs
    reducer.now += AWAY_S + job.patience_s - 0.1
    assert reducer.tick() == [], "a GOODBYE may be on its way over the other one"
    if first_too:
        reducer.engine.unreachable(b"0")
        reducer.now += 0.09
        assert reducer.tick() == []
    reducer.now += 0.11
    assert lost_rank(reducer.tick(), b"1") == 0
    assert reducer.engine.unreachable(b"0") == [], "it is no member any more"


@pytest.mark.parametrize("died", [False, True])
def test_at_the_end_a_further_stream_that_ends_first_makes_nobody_lost(two, died):
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    reducer.engine.drain()
    reducer.engine.close()
    assert reducer.engine.unreachable(b"0b") == []
    if died:
        reducer.engine.unreachable(b"0")
    else:
        assert reducer.say(0, M.GOODBYE, (1 << 64) - 1) == []
    (job,) = reducer.engine.jobs
    assert job.farewells == (set() if died else {0})
    assert job.members.keys() == {1}


def test_who_breaks_the_protocol_does_so_with_all_streams(two):
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


def test_who_waits_for_a_rank_is_no_stream_of_another(two):
    reducer, ticket = two
    assert kinds(reducer.hello(1, peer=b"1b", features=BOTH)) == [M.PING], "the holder is asked"
    assert isinstance(refusal(stream(reducer, b"1b", ticket), b"1b"), RemoteProtocolError)
    assert reducer.engine.streams(b"0") == ()
    assert reducer.engine.newly_dropped() == [b"1b"]


def test_a_rank_that_dies_is_not_waited_for_any_longer(two):
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    reducer.contribute(1, 1)
    reducer.engine.unreachable(b"0b")
    reducer.engine.unreachable(b"0")
    reducer.now += AWAY_S
    assert lost_rank(reducer.tick(), b"1") == 0


@pytest.mark.parametrize("kind", [M.ABORT, M.GOODBYE, M.CREDIT, M.SHARD_MAP, M.STRAGGLERS])
def test_only_contributions_go_over_further_streams(two, kind):
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    header = Header(kind, job=fingerprint("job"), rank=0)
    sends = reducer.served.receive(b"0b", header.pack(), b"")
    assert isinstance(refusal(sends, b"0"), RemoteProtocolError)
    assert reducer.engine.newly_dropped() == [b"0"]


def test_each_number_is_good_once(two):
    reducer, ticket = two
    for at in range(1, MAX_STREAMS):
        assert kinds(stream(reducer, b"0.%d" % at, ticket, at=at)) == [M.STREAM]
    for at in (3, 0):  # 0 is the first connection
        again = stream(reducer, b"x%d" % at, ticket, at=at)
        assert isinstance(refusal(again, b"x%d" % at), RemoteProtocolError)
        assert reducer.engine.newly_dropped() == [b"x%d" % at], "the member itself goes on"
    with pytest.raises(RemoteProtocolError, match="number must be between 0 and 15"):
        Stream(ticket, MAX_STREAMS)
    assert len(reducer.engine.streams(b"0")) == MAX_STREAMS - 1


def test_the_first_connection_has_to_be_there(two):
    reducer, ticket = two
    reducer.engine.unreachable(b"0")
    assert isinstance(refusal(stream(reducer, b"x", ticket), b"x"), MembershipError)
    assert reducer.engine.streams(b"0") == ()


def test_an_abort_that_makes_room_may_be_overtaken(two):
    reducer, ticket = two
    stream(reducer, b"0b", ticket)
    half = bytes(WINDOW // 2)
    for sequence in (number(1), number(2)):  # a window full, of which rank 0 gives the first up
        assert reducer.contribute(0, sequence, payload=half) == []
    spare = reducer.engine.jobs[0].spare
    for place in range(3, 5 + 2 * spare // WINDOW):  # in its room, and what any member has besides
        late = reducer.contribute(0, number(place), payload=half, peer=b"0b")
        assert late == [], place
    assert kinds(reducer.contribute(0, number(4000), payload=half, peer=b"0b")) == [M.ERROR]
    assert reducer.engine.newly_dropped() == [b"0"], "that is beyond any window"


def test_without_streams_nothing_overtakes_it(two):
    reducer, _ = two
    half = bytes(WINDOW // 2)
    spare = reducer.engine.jobs[0].spare
    for place in range(1, 3 + 2 * spare // WINDOW):
        assert reducer.contribute(0, number(place), payload=half) == []
    assert M.ERROR in kinds(reducer.contribute(0, number(4000), payload=half))


SECRET = b"s" * 32


def test_a_stream_proves_that_it_knows_the_secret(implementation):
    reducer = Reducer(implementation, secret=SECRET)
    ticket = join(reducer, 0)
    proof = authentication.prove_stream(SECRET, ticket, 2)
    wrong = authentication.prove_stream(b"t" * 32, ticket, 2)
    for auth, at in (("", 2), (wrong, 2), (proof, 1)):
        refused = refusal(say(reducer, b"x", Stream(ticket, at, auth)), b"x")
        assert isinstance(refused, AuthError)
    assert kinds(say(reducer, b"y", Stream(ticket, 2, proof))) == [M.STREAM]


def test_a_stream_shows_the_key_of_its_link(implementation):
    reducer = Reducer(implementation)
    reducer.engine.allow(TWO_KEYS)
    ticket = join(reducer, 0, "key-1")
    assert isinstance(refusal(stream(reducer, b"x", ticket, "key-2"), b"x"), AuthError)
    assert kinds(stream(reducer, b"y", ticket, "key-1")) == [M.STREAM]


def test_streams_leave_half_of_what_a_key_may_have(implementation):
    reducer = Reducer(implementation, limits=Limits(max_connections_per_key=6))
    reducer.engine.allow(TWO_KEYS)
    ticket = join(reducer, 0, "key-1", world_size=4)
    for at in (1, 2):
        assert kinds(stream(reducer, b"0.%d" % at, ticket, "key-1", at=at)) == [M.STREAM]
    error = refusal(stream(reducer, b"0.3", ticket, "key-1", at=3), b"0.3")
    assert isinstance(error, CapacityError)
    assert error.limit == "max_connections_per_key"
    assert "REDUCTION_STREAMS=1" in str(error)
    for rank in (1, 2, 3):
        assert kinds(reducer.hello(rank, "key-1", world_size=4)) == [M.WELCOME]
    assert kinds(reducer.hello(0, "key-1", b"more", job="other")) == [M.ERROR], "that is six"
    reducer.lose(b"0")
    for peer in (b"x", b"y", b"z"):
        job = {"job": peer.decode(), "world_size": 1}
        assert kinds(reducer.hello(0, "key-1", peer, **job)) == [M.WELCOME]


def test_streams_leave_room_for_other_connections(implementation):
    reducer = Reducer(implementation, limits=Limits(max_streams=4))
    tickets = [join(reducer, rank) for rank in range(2)]
    for rank, ticket in enumerate(tickets):
        assert kinds(stream(reducer, b"%d.1" % rank, ticket)) == [M.STREAM]
    error = refusal(stream(reducer, b"1.2", tickets[1], at=2), b"1.2")
    assert isinstance(error, CapacityError)
    assert error.limit == "max_streams"
    reducer.lose(b"0")
    assert kinds(stream(reducer, b"1.3", tickets[1], at=2)) == [M.STREAM]


@pytest.mark.parametrize("later", [1, 2])
def test_those_of_an_ended_generation_are_no_longer_counted(implementation, later):
    reducer = Reducer(implementation, limits=Limits(max_connections_per_key=6))
    reducer.engine.allow(TWO_KEYS)
    for generation in range(later + 1):
        peer = b"%d" % generation
        ticket = join(reducer, 0, "key-1", peer=peer, generation=generation)
        for at in (1, 2):
            made = stream(reducer, peer + b".%d" % at, ticket, "key-1", at=at)
            assert kinds(made) == [M.STREAM]


# -- the worker -------------------------------------------------------------------------------


def added(session, round_trip_s, ticket):
    (hello,) = session.session.connected(0, round_trip_s)
    welcome = Header(M.WELCOME, window=Header.unpack(hello.header).window).pack()
    body = encode(Welcome(incarnation="1", ticket=ticket))
    actions = session.receive(0, welcome, body)
    return [action for action in actions if isinstance(action, AddStreams)]


@pytest.mark.parametrize(
    ("round_trip_s", "streams"),
    [(0.0, 1), (0.0001, 1), (0.0249, 1), (0.0251, 2), (0.1, 5), (0.2, 8), (3.0, 8)],
)
def test_each_25_ms_of_the_round_trip_bring_another_one(implementation, round_trip_s, streams):
    assert auto_streams(round_trip_s) == streams
    session = Driven(implementation, 0, 2, ("a:1",), 0, streams=0)
    actions = added(session, round_trip_s, "a" * 32)
    said = [decode(Stream, payload) for action in actions for payload in action.payloads]
    assert said == [Stream("a" * 32, at) for at in range(1, streams)]
    assert all(Header.unpack(action.header).type is M.STREAM for action in actions)


@pytest.mark.parametrize(
    ("asked", "ticket", "expected"), [(3, "b" * 32, [2]), (3, "", []), (1, "b" * 32, [])]
)
def test_what_was_asked_for_is_made_where_the_reducer_can(implementation, asked, ticket, expected):
    session = Driven(implementation, 0, 2, ("a:1",), 0, streams=asked)
    assert [len(action.payloads) for action in added(session, 0.2, ticket)] == expected


def test_a_link_that_is_lost_as_soon_as_it_is_welcomed_gets_none(implementation, monkeypatch):
    session = Driven(implementation, 0, 2, ("a:1",), 0, streams=3)

    def lose(link):  # as a reducer that has lost something of ours is
        link.disconnect()
        return [Reset(link.index)]

    monkeypatch.setattr(session.session.failover, "welcomed", lose)
    assert added(session, 0.2, "b" * 32) == []


def test_a_worker_announces_them_if_it_may_have_some(implementation):
    for streams, announced in ((1, False), (0, True), (2, True)):
        session = Driven(implementation, 0, 2, ("a:1",), 0, streams=streams)
        (hello,) = session.session.connected(0, 0.0)
        features = decode(Hello, hello.payload).features
        assert bool(features & Feature.STREAMS) == announced


def test_a_reducer_does_not_say_stream_over_a_links_first_connection(implementation):
    session = joined(implementation, 0, 2, ("a:1", "b:2"), 0)
    session.receive(0, Header(M.STREAM).pack(), b"")
    assert not session.links[0].member
