"""Who may have a broken connection go on: RESUME."""

import hmac
import struct

import pytest

from reducer.engine.actions import GiveUp, MarkJoined, Resume
from reducer.errors import AuthError, MembershipError, RemoteProtocolError
from reducer.wire import authentication
from reducer.wire.constants import COMPILED_FEATURES, FAR_S, Feature
from reducer.wire.header import Header
from reducer.wire.messages import Hello, Stream, Welcome, decode, encode
from tests.engine.driven import Driven
from tests.engine.test_streams import join, refusal, say
from tests.engine.words import TWO_KEYS, M, Reducer
from worker_client.protocol.flight import AddStreams, MakeResumable

TICKET = "a" * 32
SECRET = b"s" * 32


def resume(reducer, peer, ticket, number=0, *, key="", auth="", attempt=0):
    body = encode(Stream(ticket, number, auth, attempt))
    return reducer.served.receive(peer, Header(M.RESUME, offset=77).pack(), body, key)


def resumed(reducer):
    """Connections that were to go on over others since this was asked last."""
    return reducer.served.asked_for(Resume)


@pytest.fixture
def two():
    return two_ranks(b"")


def two_ranks(secret):
    """A reducer of two ranks, and the ticket of rank 0, which has a stream."""
    reducer = Reducer("plain", secret=secret)
    ticket = join(reducer, 0, features=COMPILED_FEATURES)
    join(reducer, 1, features=Feature.CREDIT)
    proof = authentication.prove_stream(secret, ticket, 1) if secret else ""
    say(reducer, b"0b", Stream(ticket, 1, proof))
    return reducer, ticket


def test_who_asks_for_it_may(two):
    reducer, ticket = two
    assert reducer.served.asked_for(MarkJoined) == [(b"0", True), (b"1", False)]
    assert resume(reducer, b"x", ticket) == resume(reducer, b"y", ticket, 1) == []
    assert resumed(reducer) == [(b"0", b"x", 77), (b"0b", b"y", 77)]


def test_what_is_refused(two):
    reducer, ticket = two
    for number, (shown, at) in enumerate([(TICKET, 0), (ticket, 2)]):
        peer = b"x%d" % number
        assert isinstance(refusal(resume(reducer, peer, shown, at), peer), MembershipError)
    assert isinstance(refusal(resume(reducer, b"1", ticket), b"1"), RemoteProtocolError)
    assert reducer.dropped() == [b"1"]
    assert isinstance(refusal(resume(reducer, b"0b", ticket), b"0"), RemoteProtocolError)
    assert resumed(reducer) == []


def test_a_connection_that_was_given_up(two):
    reducer, ticket = two
    reducer.engine.unreachable(b"0")
    assert isinstance(refusal(resume(reducer, b"x", ticket), b"x"), MembershipError)
    assert resumed(reducer) == []


def test_who_goes_on_shows_the_key_of_the_link():
    reducer = Reducer("plain")
    reducer.engine.allow(TWO_KEYS)
    ticket = join(reducer, 0, "key-1", features=Feature.RESUME)  # and has no further stream
    assert isinstance(refusal(resume(reducer, b"x", ticket, key="key-2"), b"x"), AuthError)
    assert resume(reducer, b"y", ticket, key="key-1") == []


def proof(ticket, number=0, attempt=1, offset=77):
    """What the specification says of who goes on and knows `SECRET`."""
    said = f"resume\0{ticket}".encode() + struct.pack("<3Q", number, attempt, offset)
    return hmac.new(SECRET, said, "sha256").hexdigest()


def test_who_goes_on_proves_that_it_knows_the_secret():
    reducer, ticket = two_ranks(SECRET)
    of_a_stream = authentication.prove_stream(SECRET, ticket, 0)
    changed = [{"number": 1}, {"attempt": 2}, {"offset": 78}]
    wrong = ["", of_a_stream, *(proof(ticket, **change) for change in changed)]
    for number, auth in enumerate(wrong):
        peer = b"x%d" % number
        refused = resume(reducer, peer, ticket, auth=auth, attempt=1)
        assert isinstance(refusal(refused, peer), AuthError)
    assert resume(reducer, b"y", ticket, auth=proof(ticket), attempt=1) == []


def test_a_proof_that_was_overheard_is_good_for_nothing():
    reducer, ticket = two_ranks(SECRET)

    def said(peer, number, attempt):
        auth = proof(ticket, number, attempt)
        return resume(reducer, peer, ticket, number, auth=auth, attempt=attempt)

    assert said(b"x", 0, 2) == said(b"y", 1, 1) == []
    assert resumed(reducer) == [(b"0", b"x", 77), (b"0b", b"y", 77)]
    for number, attempt in enumerate([2, 1, 0]):  # again, a late one, and one without a number
        peer = b"z%d" % number
        refused = refusal(said(peer, 0, attempt), peer)
        assert isinstance(refused, AuthError)
        assert "was said before" in str(refused)
    assert resumed(reducer) == [], "the healthy connection is left alone"
    assert said(b"w", 0, 3) == []


def test_a_rank_that_others_ask_for(two):
    reducer, _ = two
    reducer.tick()
    assert reducer.served.asked_for(GiveUp) == []
    reducer.hello(0, peer=b"x", features=COMPILED_FEATURES)
    reducer.tick()
    assert reducer.served.asked_for(GiveUp) == [(b"0",), (b"0",)]
    reducer.unreachable(b"0")
    reducer.tick()
    assert reducer.served.asked_for(GiveUp) == []


@pytest.mark.parametrize(
    ("round_trip_s", "can", "asks"),
    [(FAR_S, True, True), (FAR_S, False, False), (0.9 * FAR_S, True, False), (0.2, True, True)],
)
def test_a_worker_asks_for_it_where_the_reducer_is_far(round_trip_s, can, asks):
    session = Driven(0, 2, ("a:1",), 0, streams=3, resumes=can)
    (hello,) = session.session.connected(0, round_trip_s)
    assert bool(decode(Hello, hello.payload).features & Feature.RESUME) == asks
    welcome = Header(M.WELCOME, window=Header.unpack(hello.header).window).pack()
    features = decode(Hello, hello.payload).features
    body = encode(Welcome(incarnation="1", ticket=TICKET, features=features))
    actions = session.receive(0, welcome, body)
    kept = [action for action in actions if isinstance(action, MakeResumable)]
    assert [type(action) for action in actions if isinstance(action, AddStreams)] == [AddStreams]
    assert len(kept) == asks
    for action in kept:
        header, payload = action.resumption.message(2, 1, 77)
        assert (Header.unpack(header).type, Header.unpack(header).offset) == (M.RESUME, 77)
        assert decode(Stream, payload) == Stream(TICKET, 2, attempt=1)
