"""Connections with libzmq over loopback, in either role: it is the peer that must understand us."""

import socket
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tests.zmtp.sides import MECHANISMS, TIMEOUT_S, Keys, Wire, keys_for, ours

SIZES = (0, 1, 222, 223, 255, 256, 65536, 4 << 20)  # 222: the longest that fits a short one sealed
MESSAGES = [
    *([bytes([nbytes % 251]) * nbytes] for nbytes in SIZES),
    *([b"first", b"x" * nbytes] for nbytes in (0, 256)),
    [b"", b"", b""],
    [b"a" * 255, b"b" * 65536, b"c"],
]


@pytest.fixture
def libzmq():
    """Make sockets of the other side."""

    def make(kind, keys, *, server, **options):
        made = stack.enter_context(context.socket(kind))
        made.linger = 0
        made.rcvtimeo = made.sndtimeo = int(TIMEOUT_S * 1000)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name.upper()), value)
        if keys is not None:
            made.curve_publickey, made.curve_secretkey = keys.server if server else keys.client
            if server:
                made.curve_server = True
            else:
                made.curve_serverkey = keys.server.public
        return made

    with zmq.Context() as context, ExitStack() as stack:
        yield make


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
    theirs = libzmq(kind, keys, server=serves, **options)
    with connected(theirs, keys) if serves else accepted(theirs.connect, keys) as wire:
        assert wire.next() == ("ready",)
        yield theirs, wire


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_messages_reach_a_socket_of_libzmq_and_come_back(libzmq, keys, kind):
    with reached(libzmq, kind, keys) as (theirs, wire):
        for message in MESSAGES:
            wire.send(wire.side.send(message))
            received = theirs.recv_multipart()  # with a name before it, or not
            assert received[-len(message) :] == message
            theirs.send_multipart(received)
            assert wire.next() == ("message", message)


@pytest.mark.parametrize("kind", [zmq.REP, zmq.REQ])
def test_requests_and_replies(libzmq, keys, kind):
    with reached(libzmq, kind, keys) as (theirs, wire):
        if kind == zmq.REQ:
            theirs.send(b"question")
            assert wire.next() == ("message", [b"", b"question"])
        wire.send(wire.side.send([b"", b"ours"]))
        assert theirs.recv_multipart() == [b"ours"]
        if kind == zmq.REP:
            theirs.send(b"answer")
            assert wire.next() == ("message", [b"", b"answer"])


@pytest.mark.parametrize("admitted", [True, False])
def test_libzmq_asks_and_we_hear_the_answer(libzmq, admitted):
    keys = Keys.new()
    router = libzmq(zmq.ROUTER, keys, server=True, zap_domain=b"tests")
    provider = SimpleNamespace(callback=lambda _, key: admitted and key == keys.client.public)
    with ExitStack() as stack:
        gate = ThreadAuthenticator(router.context)
        gate.start()
        stack.callback(gate.stop)
        gate.configure_curve_callback("tests", credentials_provider=provider)
        wire = stack.enter_context(connected(router, keys))
        assert wire.next() == (("ready",) if admitted else ("failed", "refused", "400"))


@pytest.mark.parametrize("admits", [True, False])
def test_we_ask_and_libzmq_hears_the_answer(libzmq, admits):
    keys = Keys.new()
    dealer = libzmq(zmq.DEALER, keys, server=False)
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


@pytest.mark.parametrize("with_keys", ["libzmq", "ours"])
def test_one_side_without_keys_is_told_apart(libzmq, with_keys):
    """Both sides say their mechanism before either closes."""
    theirs, here = (Keys.new() if side == with_keys else None for side in ("libzmq", "ours"))
    differs = ("failed", "differs", "CURVE" if theirs else "NULL")
    with connected(libzmq(zmq.ROUTER, theirs, server=True), here) as wire:
        assert wire.next() == differs
    with accepted(libzmq(zmq.DEALER, theirs, server=False).connect, here) as wire:
        assert wire.next() == differs


@pytest.mark.extended_cases("NULL")
@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_libzmq_hears_our_pongs(libzmq, keys, kind):
    with reached(libzmq, kind, keys, heartbeat_ivl=50, heartbeat_timeout=500) as (theirs, wire):
        before, deadline = wire.received, time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            assert wire.next(left) == ("nothing",)
        assert wire.received > before, "it has sent PINGs"
        wire.send(wire.side.send([b"still here"]))
        assert theirs.recv_multipart()[-1] == b"still here"


def test_libzmq_answers_our_ping(libzmq, keys):
    with reached(libzmq, zmq.ROUTER, keys) as (_, wire):
        before = wire.received
        wire.send(wire.side.ping(0))
        while wire.received == before:
            assert wire.next(0.1) == ("nothing",)
        pong = len(b"\5PONG") + 2 + (33 if keys else 0)
        assert wire.received - before == pong
