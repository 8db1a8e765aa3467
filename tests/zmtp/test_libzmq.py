"""Connections with libzmq over loopback, in either role: it is the peer that must understand us."""

import socket
import time
from contextlib import ExitStack, closing, contextmanager

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tests.zmtp.sides import MECHANISMS, TIMEOUT_S, Keys, Pair, Wire, keys_for, ours

SIZES = (0, 1, 222, 223, 255, 256, 65536, 4 << 20)  # 222: the longest that fits a short one sealed
MESSAGES = [
    *([bytes([nbytes % 251]) * nbytes] for nbytes in SIZES),
    *([b"first", b"x" * nbytes] for nbytes in (0, 256)),
    [b"", b"", b""],
    [b"a" * 255, b"b" * 65536, b"c"],
]
DOMAIN = "tests"


class Libzmq:
    """The other side's sockets, which are closed with it."""

    def __init__(self):
        self.context = zmq.Context()
        self._sockets = []

    def socket(self, kind, keys, *, server, **options):
        made = self.context.socket(kind)
        self._sockets.append(made)
        made.rcvtimeo = made.sndtimeo = int(TIMEOUT_S * 1000)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name.upper()), value)
        if keys is not None:
            pair = keys.server if server else keys.client
            made.curve_publickey, made.curve_secretkey = pair
            if server:
                made.curve_server = True
            else:
                made.curve_serverkey = keys.server.public
        return made

    def close(self):
        for made in self._sockets:
            made.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def libzmq():
    with closing(Libzmq()) as opened:
        yield opened


@pytest.fixture(params=MECHANISMS)
def keys(request):
    return keys_for(request.param)


@contextmanager
def connected(theirs, keys):
    """A client of ours, connected to a server of libzmq."""
    port = theirs.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        yield Wire(connection, ours(keys, server=False))


@contextmanager
def accepted(connect, keys, *, admits=True):
    """A server of ours, with a client of libzmq connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            yield Wire(connection, ours(keys, server=True), admits=admits)


@contextmanager
def reached(libzmq, kind, keys, **options):
    """A ROUTER or REP of libzmq that a client of ours has reached, or a client of a server's."""
    serves = kind in (zmq.ROUTER, zmq.REP)
    theirs = libzmq.socket(kind, keys, server=serves, **options)
    with connected(theirs, keys) if serves else accepted(theirs.connect, keys) as wire:
        assert wire.next() == ("ready",)
        yield theirs, wire


@contextmanager
def authenticator(libzmq, admitted):
    """What admits one key to the sockets of a context."""

    class Provider:
        def callback(self, domain, key):
            del domain
            return admitted is not None and key == admitted.public

    thread = ThreadAuthenticator(libzmq.context)
    thread.start()
    thread.configure_curve_callback(DOMAIN, credentials_provider=Provider())
    try:
        yield thread
    finally:
        thread.stop()


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_messages_reach_a_socket_of_libzmq_and_come_back(libzmq, keys, kind):
    with reached(libzmq, kind, keys) as (theirs, wire):
        for message in MESSAGES:
            wire.send(wire.side.send(message))
            received = theirs.recv_multipart()  # with a name before it, or not
            assert received[-len(message) :] == message
            theirs.send_multipart(received)
            assert wire.next() == ("message", message)


def test_many_messages_at_once(libzmq, keys):
    messages = [[b"%d" % number, bytes(number * 7)] for number in range(300)]
    with reached(libzmq, zmq.ROUTER, keys) as (router, wire):
        wire.send(b"".join(wire.side.send(message) for message in messages))
        for message in messages:
            name, *frames = router.recv_multipart()
            assert frames == message
            router.send_multipart([name, *frames])
        assert [wire.next() for _ in messages] == [("message", message) for message in messages]


@pytest.mark.parametrize("kind", [zmq.REP, zmq.DEALER])
def test_a_client_of_ours_talks_to_other_sockets(libzmq, keys, kind):
    peer = libzmq.socket(kind, keys, server=True)
    envelope = [b""] if kind == zmq.REP else []
    with connected(peer, keys) as wire:
        assert wire.next() == ("ready",)
        wire.send(wire.side.send([*envelope, b"question"]))
        assert peer.recv_multipart() == [b"question"]
        peer.send_multipart([b"answer"])
        assert wire.next() == ("message", [*envelope, b"answer"])


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.ROUTER])
def test_a_server_of_ours_talks_to_other_sockets(libzmq, keys, kind):
    peer = libzmq.socket(kind, keys, server=False)
    name = [b"we"] if kind == zmq.ROUTER else []
    envelope = [b""] if kind == zmq.REQ else []
    if name:
        peer.setsockopt(zmq.CONNECT_ROUTING_ID, name[0])
    with accepted(peer.connect, keys) as wire:
        assert wire.next() == ("ready",)
        peer.send_multipart([*name, b"question"])
        assert wire.next() == ("message", [*envelope, b"question"])
        wire.send(wire.side.send([*envelope, b"answer"]))
        assert peer.recv_multipart() == [*name, b"answer"]


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.SUB, zmq.PAIR])
def test_no_server_for_sockets_of_other_patterns(libzmq, keys, kind):
    with accepted(libzmq.socket(kind, keys, server=False).connect, keys) as wire:
        # Each refuses the other; who does it first says nothing more.
        assert wire.next() in {("failed", "malformed", ""), ("closed",)}
        assert not wire.side.ready


# -- who may connect -------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["admitted", "another key", "an address"])
def test_libzmq_asks_and_we_hear_the_answer(libzmq, why):
    keys = None if why == "an address" else Keys.new()
    router = libzmq.socket(zmq.ROUTER, keys, server=True, zap_domain=DOMAIN.encode())
    with authenticator(libzmq, keys.client if why == "admitted" else Pair.new()) as gate:
        if why == "an address":
            gate.deny("127.0.0.1")
        with connected(router, keys) as wire:
            refused = ("failed", "refused", "400")
            assert wire.next() == (("ready",) if why == "admitted" else refused)


@pytest.mark.parametrize("admits", [True, False])
def test_we_ask_and_libzmq_hears_the_answer(libzmq, admits):
    keys = Keys.new()
    dealer = libzmq.socket(zmq.DEALER, keys, server=False)
    succeeded, failed = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with ExitStack() as stack:
        monitor = dealer.get_monitor_socket(succeeded | failed)
        stack.callback(monitor.close, linger=0)
        stack.callback(dealer.disable_monitor)
        wire = stack.enter_context(accepted(dealer.connect, keys, admits=admits))
        assert wire.next() == (("ready",) if admits else ("failed", "unknown-key", ""))
        assert wire.asked == [("admit", z85.decode(keys.client.public))]
        assert monitor.poll(TIMEOUT_S * 1000)
        heard = recv_monitor_message(monitor)
        assert heard["event"] == (succeeded if admits else failed)
        assert admits or heard["value"] == 400


def test_a_client_with_another_servers_key_is_not_answered(libzmq):
    keys = Keys.new()
    wrong = keys._replace(server=Pair.new())
    with connected(libzmq.socket(zmq.ROUTER, keys, server=True), wrong) as wire:
        assert wire.next() == ("closed",)
    with accepted(libzmq.socket(zmq.DEALER, wrong, server=False).connect, keys) as wire:
        assert wire.next() == ("failed", "wrong-key", "")


@pytest.mark.parametrize("with_keys", ["libzmq", "ours"])
def test_one_side_without_keys_is_told_apart(libzmq, with_keys):
    """Both sides say their mechanism before either closes."""
    theirs, here = (Keys.new() if side == with_keys else None for side in ("libzmq", "ours"))
    differs = ("failed", "differs", "CURVE" if theirs else "NULL")
    with connected(libzmq.socket(zmq.ROUTER, theirs, server=True), here) as wire:
        assert wire.next() == differs
    with accepted(libzmq.socket(zmq.DEALER, theirs, server=False).connect, here) as wire:
        assert wire.next() == differs


# -- heartbeats ------------------------------------------------------------------------------------

TIMEOUT_MS = 500
BEATS = {"heartbeat_ivl": 50, "heartbeat_timeout": TIMEOUT_MS}


def stays(wire, theirs):
    """While nobody sends a message PINGs are answered, and a message arrives afterwards."""
    before, deadline = wire.received, time.monotonic() + 2 * TIMEOUT_MS / 1000
    while (left := deadline - time.monotonic()) > 0:
        assert wire.next(left) == ("nothing",)
    assert wire.received > before, "it has sent PINGs"
    wire.send(wire.side.send([b"still here"]))
    assert theirs.recv_multipart()[-1] == b"still here"


@pytest.mark.extended_cases("NULL")
def test_a_server_of_libzmq_hears_our_pongs(libzmq, keys):
    with reached(libzmq, zmq.ROUTER, keys, **BEATS) as (router, wire):
        stays(wire, router)
        time.sleep(2 * TIMEOUT_MS / 1000)  # and now we answer none
        assert wire.next() == ("closed",)


def test_a_client_of_libzmq_hears_our_pongs(libzmq, keys):
    with reached(libzmq, zmq.DEALER, keys, **BEATS) as (dealer, wire):
        stays(wire, dealer)


def test_libzmq_answers_our_ping_and_minds_its_time_to_live(libzmq, keys):
    with reached(libzmq, zmq.ROUTER, keys) as (_, wire):
        before = wire.received
        wire.send(wire.side.ping(0))
        while wire.received == before:
            assert wire.next(0.1) == ("nothing",)
        pong = len(b"\5PONG") + 2 + (33 if keys else 0)
        assert wire.received - before == pong
        wire.send(wire.side.ping(3))  # tenths of a second
        began = time.monotonic()
        while (event := wire.next(5.0)) == ("nothing",):
            pass
        assert event == ("closed",)
        assert time.monotonic() - began > 0.2
