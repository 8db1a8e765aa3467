"""Ranks and the reducers that they host prove to each other that they know the job's secret."""

import hashlib
import hmac
import json
from dataclasses import replace

import pytest

from reducer.engine import admission
from reducer.errors import AuthError
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Hello, decode, decode_error, encode
from tests.engine.driven import Driven
from tests.engine.twins import IMPLEMENTATIONS, Served
from worker_client.protocol.flight import Send
from worker_client.protocol.link import LinkState

SECRET = bytes(range(32))
ADDRESS = "here:1"
PEER, OTHER = b"peer-1", b"peer-2"
M = MessageType


def proof(secret, word, header, hello, nonce):
    """What the specification says, in other words than the product's."""
    said = word.encode("ascii") + b"\0" + (hello["auth"][:32] + nonce).encode("ascii")
    numbers = (header.job, header.generation, header.rank, hello["reducer_index"], hello["lane"])
    said += b"".join(number.to_bytes(8, "little") for number in numbers)
    return hmac.HMAC(secret, said + ADDRESS.encode("ascii"), hashlib.sha256).hexdigest()


@pytest.fixture(params=IMPLEMENTATIONS)
def served(request):
    return Served(request.param, address=ADDRESS, secret=SECRET)


def a_rank(secret=SECRET, address=ADDRESS, hosts=True):
    return Driven(0, 2, (address,), 1 << 16, hosts={0: 0} if hosts else {}, secret=secret)


def hello_of(rank):
    (said,) = rank.connected(0)
    return said


def ask(served, said, peer=PEER):
    """What the reducer answers to one message."""
    (answer,) = served.receive(peer, said.header, bytes(said.payload))
    assert answer.peer == peer
    return Header.unpack(answer.header), bytes(answer.payload)


def answered(served, rank, peer=PEER):
    """What a rank says to the challenge that its HELLO brings."""
    header, body = ask(served, hello_of(rank), peer)
    assert header.type is M.CHALLENGE
    (again,) = rank.receive(0, header.pack(), body)
    return again


def refusal(answer):
    header, body = answer
    assert header.type is M.ERROR
    error = decode_error(body, header.sequence)
    assert isinstance(error, AuthError)
    return str(error)


def test_both_sides_prove_it_by_the_specification(served):
    rank = a_rank()
    said = hello_of(rank)
    first = json.loads(bytes(said.payload))
    header, body = ask(served, said)
    assert (header.type, header.rank) == (M.CHALLENGE, 0)
    nonce = json.loads(body)["nonce"]
    assert served.engine.jobs == []
    (again,) = rank.receive(0, header.pack(), body)
    second = json.loads(bytes(again.payload))
    expected = proof(SECRET, "worker", Header.unpack(again.header), first, nonce)
    assert second == {**first, "auth": first["auth"] + expected}
    header, body = ask(served, again)
    assert header.type is M.WELCOME
    shown = json.loads(body)["auth"]
    assert shown == proof(SECRET, "reducer", Header.unpack(again.header), first, nonce)
    rank.receive(0, header.pack(), body)
    assert rank.links[0].state is LinkState.MEMBER


def test_a_nonce_is_never_used_twice(served):
    rank = a_rank()
    nonces = {json.loads(ask(served, hello_of(rank), peer)[1])["nonce"] for peer in (PEER, OTHER)}
    assert len(nonces) == 2
    said = [json.loads(bytes(hello_of(a_rank()).payload))["auth"] for _ in range(2)]
    assert len(set(said)) == 2


def test_a_hello_that_was_heard_earlier_is_of_no_use(served):
    again = answered(served, a_rank())
    assert ask(served, again, OTHER)[0].type is M.CHALLENGE
    assert "whose secret" in refusal(ask(served, again, OTHER))
    assert served.engine.jobs == []
    assert ask(served, again)[0].type is M.WELCOME
    served.engine.unreachable(PEER)
    assert ask(served, again)[0].type is M.CHALLENGE, "of a peer that calls itself the same"
    assert "whose secret" in refusal(ask(served, again))


def test_who_floods_a_reducer_with_hellos_locks_nobody_out(served):
    rank = a_rank()
    said = hello_of(rank)
    header, body = ask(served, said)
    for number in range(admission.MAX_NONCES):  # and so it keeps no more
        ask(served, said, b"%d" % number)
    (again,) = rank.receive(0, header.pack(), body)
    header, body = ask(served, again)
    assert header.type is M.CHALLENGE
    (again,) = rank.receive(0, header.pack(), body)
    assert ask(served, again)[0].type is M.WELCOME


@pytest.mark.parametrize("change", ["none", "guessed", "of another lane"])
def test_a_wrong_proof_is_refused(served, change):
    rank = a_rank()
    said = hello_of(rank) if change == "none" else answered(served, rank)
    hello = decode(Hello, bytes(said.payload))
    wrong = {
        "none": {"auth": ""},
        "guessed": {"auth": hello.auth[:32] + "0" * 64},
        "of another lane": {"lane": 1},
    }
    changed = encode(replace(hello, **wrong[change]))
    assert "whose secret" in refusal(ask(served, Send(0, said.header, changed)))
    assert served.engine.counters.unauthenticated == 1
    assert served.engine.jobs == []


@pytest.mark.parametrize("wrong", [{"secret": bytes(32)}, {"address": "there:1"}])
def test_a_proof_by_another_secret_or_for_another_reducer_is_refused(served, wrong):
    rank = a_rank(**wrong)
    answer = ask(served, answered(served, rank))
    assert "whose secret" in refusal(answer)
    rank.receive(0, answer[0].pack(), answer[1])
    assert isinstance(rank.links[0].refusal, AuthError)


@pytest.mark.parametrize("secret", [b"", bytes(32)])
def test_a_reducer_without_the_secret_is_refused(secret):
    stranger = Served("plain", address=ADDRESS, secret=secret)
    rank = a_rank()
    header, body = ask(stranger, hello_of(rank))
    if secret:
        (again,) = rank.receive(0, header.pack(), body)
        nonce = json.loads(body)["nonce"]
        mine = json.loads(bytes(again.payload))
        header = header._replace(type=M.WELCOME, window=1024)
        shown = proof(secret, "reducer", Header.unpack(again.header), mine, nonce)
        body = json.dumps({"incarnation": "1", "version": "1.0", "auth": shown}).encode()
    assert header.type is M.WELCOME
    assert rank.receive(0, header.pack(), body) == []
    assert rank.links[0].state is LinkState.NOT_JOINED
    assert "does not know this job's secret" in str(rank.links[0].refusal)


def test_a_pool_asks_for_no_secret():
    pool = Served("plain", address=ADDRESS)
    rank = a_rank(hosts=False)
    said = hello_of(rank)
    assert json.loads(bytes(said.payload))["auth"] == ""
    header, body = ask(pool, said)
    rank.receive(0, header.pack(), body)
    assert rank.links[0].state is LinkState.MEMBER


def test_who_knows_no_secret_answers_no_challenge():
    rank = a_rank(secret=b"", hosts=False)
    hello_of(rank)
    challenge = json.dumps({"nonce": "0" * 32}).encode()
    assert rank.receive(0, Header(M.CHALLENGE).pack(), challenge) == []
    assert isinstance(rank.links[0].refusal, AuthError)
