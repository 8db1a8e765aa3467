"""Links of several connections: STREAM."""

import pytest

from reducer.errors import AuthError, ReductionError, RemoteProtocolError
from reducer.wire import authentication
from reducer.wire.constants import MAX_STREAMS, Feature
from reducer.wire.header import Header
from reducer.wire.messages import Hello, Stream, Welcome, decode, encode
from tests.engine import driven
from tests.engine.driven import Driven, joined
from tests.engine.transcripts import transcripts
from tests.engine.words import WINDOW, M, Reducer, kinds, number, told
from worker_client.protocol.flight import AddStreams, Reset
from worker_client.protocol.joining import auto_streams

BOTH = Feature.CREDIT | Feature.STREAMS


def join(reducer, rank, key="", features=BOTH, **change):
    """Join; return the ticket that the reducer has given."""
    sends = reducer.hello(rank, key, features=features, **change)
    (welcome,) = (send for send in sends if kinds([send]) == [M.WELCOME])
    return decode(Welcome, welcome.payload).ticket


def stream(reducer, peer, ticket, at=1):
    return say(reducer, peer, Stream(ticket, at))


def say(reducer, peer, body):
    return reducer.served.receive(peer, Header(M.STREAM).pack(), encode(body))


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


@pytest.mark.parametrize("streams", [1, 2])
def test_an_abort_that_makes_room_may_be_overtaken_if_there_are_streams(two, streams):
    reducer, ticket = two
    peer = b"0" if streams == 1 else b"0b"
    if streams == 2:
        stream(reducer, peer, ticket)
    half = bytes(WINDOW // 2)
    spare = reducer.engine.jobs[0].spare
    # A window full, as much again in the room of what rank 0 gives up, and what any member has.
    for place in range(1, 1 + 2 * streams + 2 * spare // WINDOW):
        assert reducer.contribute(0, number(place), payload=half, peer=peer) == [], place
    assert kinds(reducer.contribute(0, number(4000), payload=half, peer=peer)) == [M.ERROR]
    assert reducer.dropped() == [b"0"], "that is beyond any window"


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


test_who_may_have_a_stream = transcripts("""
Who does not ask gets no ticket
    each features: 0 | Feature.CREDIT
    new
    0 HELLO features=$features -> 0 WELCOME ticket=

A link that begins anew gives another ticket
    new
    0 HELLO features=BOTH -> 0 WELCOME ticket=?first
    0b STREAM ticket=first number=1 -> 0b STREAM
    unreachable 0
    0@0c HELLO features=BOTH -> 0c WELCOME ticket=?second
    x STREAM ticket=first number=1 -> x MembershipError
    y STREAM ticket=second number=1 -> y STREAM
    streams 0c y
    0@0d HELLO features=BOTH generation=1 -> 0c StaleGenerationError, 0d WELCOME ticket=?third
    x STREAM ticket=second number=1
    z STREAM ticket=second number=1 -> z MembershipError
    0e STREAM ticket=third number=1 -> 0e STREAM
    streams 0d 0e

A stream shows the key of its link
    new
    allow key-1=* key-2=*
    0 HELLO features=BOTH key=key-1 -> 0 WELCOME ticket=?ticket
    x STREAM ticket=ticket number=1 key=key-2 -> x AuthError
    y STREAM ticket=ticket number=1 key=key-1 -> y STREAM

Streams leave half of what a key may have
    new max_connections_per_key=6
    allow key-1=*
    0 HELLO features=BOTH key=key-1 world_size=4 -> 0 WELCOME ticket=?ticket
    0.1 STREAM ticket=ticket number=1 key=key-1 -> 0.1 STREAM
    0.2 STREAM ticket=ticket number=2 key=key-1 -> 0.2 STREAM
    0.3 STREAM ticket=ticket number=3 key=key-1
        -> 0.3 CapacityError limit=max_connections_per_key says=REDUCTION_STREAMS=1
    1 2 3 HELLO key=key-1 world_size=4 -> 1 2 3 WELCOME
    0@more HELLO key=key-1 job=other -> more CapacityError      # that is six
    lose 0
    0@x HELLO key=key-1 job=x world_size=1 -> x WELCOME
    0@y HELLO key=key-1 job=y world_size=1 -> y WELCOME
    0@z HELLO key=key-1 job=z world_size=1 -> z WELCOME

Streams leave room for other connections
    new max_streams=4
    0 HELLO features=BOTH -> 0 WELCOME ticket=?first
    1 HELLO features=BOTH -> 1 WELCOME ticket=?second
    0.1 STREAM ticket=first number=1 -> 0.1 STREAM
    1.1 STREAM ticket=second number=1 -> 1.1 STREAM
    1.2 STREAM ticket=second number=2 -> 1.2 CapacityError limit=max_streams
    lose 0
    1.3 STREAM ticket=second number=2 -> 1.3 STREAM

Those of an ended generation are no longer counted
    new max_connections_per_key=6
    allow key-1=*
    0 HELLO features=BOTH key=key-1 -> 0 WELCOME ticket=?ticket
    0.1 STREAM ticket=ticket number=1 key=key-1 -> 0.1 STREAM
    0.2 STREAM ticket=ticket number=2 key=key-1 -> 0.2 STREAM
    0@1 HELLO features=BOTH key=key-1 generation=1
        -> 0 StaleGenerationError, 1 WELCOME ticket=?ticket
    1.1 STREAM ticket=ticket number=1 key=key-1 -> 1.1 STREAM
    1.2 STREAM ticket=ticket number=2 key=key-1 -> 1.2 STREAM
    0@2 HELLO features=BOTH key=key-1 generation=2
        -> 1 StaleGenerationError, 2 WELCOME ticket=?ticket
    2.1 STREAM ticket=ticket number=1 key=key-1 -> 2.1 STREAM
    2.2 STREAM ticket=ticket number=2 key=key-1 -> 2.2 STREAM
""")

TWO = """
    new
    0 HELLO features=BOTH -> 0 WELCOME ticket=?ticket
    1 HELLO features=BOTH -> 1 WELCOME
"""
test_numbers_and_tickets = transcripts(
    """
A ticket is good while its member is here
    x STREAM ticket="'0'*32" number=1 -> x MembershipError
    0 GOODBYE
    y STREAM ticket=ticket number=1 -> y MembershipError
    streams 0

Each number is good once
    0.1 STREAM ticket=ticket number=1 -> 0.1 STREAM
    x STREAM ticket=ticket number=1 -> x RemoteProtocolError
    dropped x                                   # the member itself goes on
    y STREAM ticket=ticket number=0 -> y RemoteProtocolError    # that is the first connection
    dropped y

The first connection has to be there
    unreachable 0
    x STREAM ticket=ticket number=1 -> x MembershipError
    streams 0

Who waits for a rank is no stream of another
    1@1b HELLO features=BOTH -> 1 PING          # the holder is asked
    1b STREAM ticket=ticket number=1 -> 1b RemoteProtocolError
    streams 0
    dropped 1b
""",
    TWO,
)
test_two_connections = transcripts(
    """
Contributions count over any stream
    streams 0 0b
    0@0b CONTRIBUTION 1 value=1.0
    1 CONTRIBUTION 1 value=2.0 -> 0 1 RESULT    # over which of its connections, the loop decides
    0 CONTRIBUTION 2 value=1.0
    1 CONTRIBUTION 2 value=2.0 -> 0 1 RESULT
    0@0b CONTRIBUTION 3 value=1.0
    1 CONTRIBUTION 3 value=2.0 -> 0 1 RESULT
    0 CONTRIBUTION 3 value=1.0                  # it was here already
    counters duplicates=1
    taken 6                                     # streams are healthy, too

Who breaks the protocol does so with all streams
    1 CONTRIBUTION 1
    0b STREAM ticket=ticket number=1 -> 0 RemoteProtocolError, 1 RankLostError
    dropped 0
    0 CONTRIBUTION 2
    0@0b CONTRIBUTION 2
    counters ignored=2

Who loses one stream has lost the link
    each then: unreachable 0 | dropped
    1 CONTRIBUTION 1
    unreachable 0b
    later UNREACHABLE_S+PEER_TIMEOUT_MS/1000-0.1    # a GOODBYE may be on its way over the other one
    $then
    later 0.09
    later 0.02 -> 1 RankLostError rank=0
    unreachable 0                               # it is no member any more

At the end a further stream that ends first makes nobody lost
    each then: 0 GOODBYE -> 1 RankLostError text="rank 0 left the job"
        | unreachable 0 -> 1 RankLostError rank=0 says=died
    1 CONTRIBUTION 1
    drain -> 0 1 GOODBYE
    close
    unreachable 0b
    $then
    jobs job=1

A rank that dies is not waited for any longer
    1 CONTRIBUTION 1
    unreachable 0b 0
    later UNREACHABLE_S -> 1 RankLostError rank=0

Only contributions go over further streams
    each kind: ABORT | GOODBYE | CREDIT | SHARD_MAP | STRAGGLERS
    0b $kind 0 -> 0 RemoteProtocolError
    dropped 0
""",
    TWO + "    0b STREAM ticket=ticket number=1 -> 0b STREAM\n",
)


def test_a_link_has_no_more_streams_than_numbers(two):
    reducer, ticket = two
    for at in range(1, MAX_STREAMS):
        assert kinds(stream(reducer, b"0.%d" % at, ticket, at)) == [M.STREAM]
    with pytest.raises(RemoteProtocolError, match="number must be between 0 and 15"):
        Stream(ticket, MAX_STREAMS)
    assert len(reducer.engine.members.streams(b"0")) == MAX_STREAMS - 1


def added(session, round_trip_s, ticket):
    actions = driven.join(session, 0, round_trip_s=round_trip_s, ticket=ticket)
    return [action for action in actions if isinstance(action, AddStreams)]


@pytest.mark.parametrize(
    ("round_trip_s", "streams"),
    [(0.0, 1), (0.0249, 1), (0.0251, 2), (0.1, 5), (0.2, 8), (3.0, 8)],
)
def test_each_25_ms_of_the_round_trip_bring_another_one(round_trip_s, streams):
    assert auto_streams(round_trip_s) == streams
    session = Driven(0, 2, ("a:1",), 0, streams=0)
    actions = added(session, round_trip_s, "a" * 32)
    said = [decode(Stream, payload) for action in actions for payload in action.payloads]
    assert said == [Stream("a" * 32, at) for at in range(1, streams)]
    assert all(Header.unpack(action.header).type is M.STREAM for action in actions)


@pytest.mark.parametrize(
    ("asked", "ticket", "expected"), [(3, "b" * 32, [2]), (3, "", []), (1, "b" * 32, [])]
)
def test_what_was_asked_for_is_made_where_the_reducer_can(asked, ticket, expected):
    session = Driven(0, 2, ("a:1",), 0, streams=asked)
    (hello,) = session.session.connected(0, 0.2)
    assert bool(decode(Hello, hello.payload).features & Feature.STREAMS) == (asked > 1)
    session.session.disconnected(0, "was cut")
    assert [len(action.payloads) for action in added(session, 0.2, ticket)] == expected


def test_a_link_that_is_lost_as_soon_as_it_is_welcomed_gets_none(monkeypatch):
    session = Driven(0, 2, ("a:1",), 0, streams=3)

    def lose(link):  # as a reducer that has lost something of ours is
        link.disconnect()
        return [Reset(link.index)]

    monkeypatch.setattr(session.session.failover, "welcomed", lose)
    assert added(session, 0.2, "b" * 32) == []


def test_a_reducer_does_not_say_stream_over_a_links_first_connection():
    session = joined(0, 2, ("a:1", "b:2"), 0)
    session.receive(0, Header(M.STREAM).pack(), b"")
    assert not session.links[0].member
