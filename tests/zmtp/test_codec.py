"""The codec without a network: two of ours, and what no honest peer says."""

import pytest
from zmq.utils import z85

from fuzz.seeded import Seeded
from tests.zmtp import _zmtp
from tests.zmtp.sides import (
    MAX_FRAME_BYTES,
    MECHANISMS,
    Keys,
    Pair,
    joined,
    keys_for,
    ours,
    shake_hands,
)

GREETING_BYTES = 64
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MESSAGES = [[b""], [b"x"], [b"x" * 255, b"", b"y" * 256], [b"z" * 3000]]
MALFORMED = [("failed", "malformed", "")]
TOO_LARGE = [("failed", "too-large", "")]
WRONG_KEY = [("failed", "wrong-key", "")]


@pytest.fixture(params=MECHANISMS)
def keys(request):
    return keys_for(request.param)


def greeting(mechanism=b"NULL", version=b"\3\1", as_server=0):
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(body):
    """A frame of a command."""
    if len(body) < 256:
        return bytes([4, len(body)]) + body
    return b"\6" + len(body).to_bytes(8, "big") + body


def properties(*pairs):
    return b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in pairs
    )


def ready(kind=b"DEALER"):
    return command(b"\5READY" + properties((b"Socket-Type", kind), (b"Identity", b"")))


def test_two_of_ours_understand_each_other(keys):
    client, server = ours(keys, server=False), ours(keys, server=True)
    noticed = shake_hands(client, server)
    admitted = [("admit", z85.decode(keys.client.public))] if keys else []
    assert noticed == ([("ready",)], [*admitted, ("ready",)])
    assert client.sealed == server.sealed == (keys is not None)
    for message in MESSAGES:
        for sender, receiver in ((client, server), (server, client)):
            assert receiver.take(sender.send(message)) == [("message", message)]


def test_what_ours_say_without_keys_is_rfc_37():
    client, server = ours(None, server=False), ours(None, server=True)
    first, rest = b"\xff" + bytes(7) + b"\1\x7f\3", greeting()[11:]
    assert client.reply() == server.reply() == first
    assert server.take(first[:-1]) == []
    assert server.reply() == b""
    assert server.take(first[-1:]) == client.take(first) == []
    assert server.reply() == client.reply() == rest
    assert server.take(rest) == client.take(rest) == []
    assert server.reply() == ready(b"ROUTER")
    assert client.take(ready(b"ROUTER")) == [("ready",)]
    assert client.reply() == ready(b"DEALER")
    assert client.send([b"", b"x" * 255, b"y" * 256]) == b"".join(
        (b"\1\0", b"\1\xff" + b"x" * 255, b"\2" + bytes(6) + b"\1\0" + b"y" * 256)
    )
    assert client.ping(0x102) == b"\4\7\4PING\1\2"


def test_sealed_frames_are_those_of_rfc_26():
    client, server = joined(Keys.new())
    sent = [client.send([bytes(nbytes)]) for nbytes in (0, 222, 223)]
    assert [frame[0] for frame in sent] == [0, 0, 2]
    assert [len(frame) for frame in sent] == [2 + 33, 2 + 33 + 222, 9 + 33 + 223]
    assert sent[0][1:10] == b"\x21\7MESSAGE"
    counts = [
        int.from_bytes(frame[at : at + 8], "big")
        for frame, at in zip(sent, (10, 10, 17), strict=True)
    ]
    assert [count - counts[0] for count in counts] == [0, 1, 2]
    assert server.take(b"".join(sent))[-1] == ("message", [bytes(223)])


def test_a_ping_between_the_frames_of_a_message():
    """libzmq's timer does not wait for the last frame."""
    client, server = joined(None)
    first, second = b"\1\1a", b"\0\1b"
    assert server.take(first + client.ping(0) + second) == [("message", [b"a", b"b"])]
    assert server.reply() == b"\4\5\4PONG"


# -- greetings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(bytes(64), id="zeros"),
        pytest.param(b"\xff" + bytes(7) + b"\5\0name", id="zmtp-1-long"),
        pytest.param(SIGNATURE + b"\1\5", id="zmtp-2"),
        pytest.param(SIGNATURE + b"\2", id="version-2"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: reducer\r\n\r\n", id="http"),
    ],
)
def test_strangers_are_told_by_their_first_wrong_byte(keys, said):
    for server in (True, False):
        for cut in ([said], [bytes([byte]) for byte in said]):
            side = ours(keys, server=server)
            events = [event for piece in cut for event in side.take(piece)]
            assert events == [("failed", "foreign", "")]


@pytest.mark.parametrize("version", [b"\3\0", b"\3\1", b"\3\7", b"\4\0", b"\xff\xff"])
def test_later_versions_are_answered_with_ours(version):
    side = ours(None, server=True)
    assert side.take(greeting(version=version) + ready()) == [("ready",)]
    assert side.reply()[10:12] == b"\3\1"


@pytest.mark.parametrize(
    ("mechanism", "shown"),
    [(b"", ""), (b"NULLS", "NULLS"), (b"CURVE25519", "CURVE25519"), (b"a\n\xff\x1b", "a???")],
)
def test_other_mechanisms_differ(keys, mechanism, shown):
    for server in (True, False):
        side = ours(keys, server=server)
        assert side.take(greeting(mechanism)) == [("failed", "differs", shown)]


def test_two_servers_with_keys_do_not_wait_for_each_other():
    keys = Keys.new()
    assert ours(keys, server=True).take(greeting(b"CURVE", as_server=1)) == MALFORMED
    assert ours(keys, server=False).take(greeting(b"CURVE", as_server=1)) == []


@pytest.mark.parametrize(
    ("metadata", "server", "suits"),
    [
        *((properties((b"Socket-Type", kind)), True, True) for kind in (b"DEALER", b"REQ")),
        *((properties((b"Socket-Type", kind)), False, True) for kind in (b"ROUTER", b"REP")),
        (properties((b"Socket-Type", b"ROUTER")), True, True),
        (properties((b"Socket-Type", b"REP")), True, False),
        (properties((b"Socket-Type", b"REQ")), False, False),
        *((properties((b"Socket-Type", kind)), True, False) for kind in (b"PUB", b"", b"dealer")),
        (properties((b"SOCKET-type", b"DEALER"), (b"X-More", b"x" * 300)), True, True),
        (properties((b"Identity", b"x" * 255), (b"Socket-Type", b"DEALER")), True, True),
        (b"", True, False),
        (properties((b"", b"x"), (b"Socket-Type", b"DEALER")), True, False),
        (properties((b"Socket-Type", b"DEALER")) + b"\1", True, False),
        (properties((b"Socket-Type", b"DEALER")) + b"\1x\0\0\0", True, False),
        (b"\x0bSocket-Type\xff\xff\xff\xffDEALER", True, False),
        (b"\xffSocket-Type\0\0\0\6DEALER", True, False),
    ],
)
def test_who_suits(metadata, server, suits):
    side = ours(None, server=server)
    said = greeting() + command(b"\5READY" + metadata)
    assert side.take(said) == ([("ready",)] if suits else MALFORMED)


LONGEST = 1024  # of a command


def headers(kind):
    """Headers of frames that are none, of messages or commands, and what is noticed."""
    return [
        pytest.param(b"\4\0", MALFORMED, id="an-empty-command"),
        pytest.param(b"\5", MALFORMED, id="more-of-a-command"),
        *(
            pytest.param(bytes([kind | 1 << bit]), MALFORMED, id=f"bit-{bit}")
            for bit in range(3, 8)
        ),
        pytest.param(bytes([kind | 2]) + b"\x80" + bytes(7), MALFORMED, id="2-to-the-63"),
        pytest.param(bytes([kind | 2]) + b"\xff" * 8, MALFORMED, id="2-to-the-64-less-1"),
        pytest.param(bytes([kind | 2, 0x7F]) + b"\xff" * 7, TOO_LARGE, id="2-to-the-63-less-1"),
    ]


@pytest.mark.parametrize(
    ("said", "events"),
    [
        *headers(4),
        pytest.param(b"\0\6\5READY", MALFORMED, id="ready-as-a-message"),
        pytest.param(b"\6" + (LONGEST + 1).to_bytes(8, "big"), TOO_LARGE, id="beyond"),
        pytest.param(b"\6" + LONGEST.to_bytes(8, "big"), [], id="the-longest"),
        pytest.param(command(b"x" * LONGEST), MALFORMED, id="the-longest-whole"),
        pytest.param(command(b"\5HALLO"), MALFORMED, id="another-name"),
        pytest.param(command(b"\5READ"), MALFORMED, id="a-short-name"),
        pytest.param(command(b"\4PING\0\0"), MALFORMED, id="ping"),
        pytest.param(command(b"\5ERROR\x04400"), MALFORMED, id="error-with-less"),
        pytest.param(command(b"\5ERROR\0"), [("failed", "refused", "")], id="error-empty"),
        pytest.param(
            command(b"\5ERROR\3a\n\xfe"), [("failed", "refused", "a??")], id="error-unprintable"
        ),
        pytest.param(
            command(b"\5ERROR\xff" + b"e" * 255), [("failed", "refused", "e" * 255)], id="long"
        ),
    ],
)
@pytest.mark.parametrize("server", [True, False])
def test_what_may_follow_the_greeting(keys, said, events, server):
    side = ours(keys, server=server)
    assert side.take(greeting(b"CURVE" if keys else b"NULL")) == []
    assert side.take(said) == events
    assert side.take(ready()) == ([] if events else side.take(b""))


def test_nothing_is_looked_at_before_the_answer():
    keys = Keys.new()
    client, server = ours(keys, server=False), ours(keys, server=True)
    for _ in range(2):
        server.take(client.reply())
        client.take(server.reply())
    initiate = client.reply()
    assert server.take(initiate + b"\0\x21\7MESSAGE")[0][0] == "admit"
    assert server.take(bytes(25)) == []
    assert server.reply() == b""
    assert server.admit(True) == [("ready",), *MALFORMED], "a nonce of zero"


def test_wrong_keys_open_nothing():
    keys = Keys.new()
    anothers_public = Pair(keys.client.public, Pair.new().secret)
    for wrong in (keys._replace(server=Pair.new()), keys._replace(client=anothers_public)):
        client, server = ours(wrong, server=False), ours(keys, server=True)
        assert shake_hands(client, server)[1] == WRONG_KEY
        assert server.reply() == b""


def test_a_key_of_small_order_is_refused():
    """Whoever gives one knows what is made of it, whatever the other key is."""
    pair = [z85.decode(key) for key in Pair.new()]
    client = _zmtp.Zmtp(False, (pair[0], pair[1], bytes(32)), MAX_FRAME_BYTES)
    assert client.take(greeting(b"CURVE")) == WRONG_KEY
    assert len(client.reply()) == GREETING_BYTES
    server = ours(Keys.new(), server=True)
    hello = b"\5HELLO\1\0" + bytes(72 + 32) + bytes(7) + b"\1" + bytes(80)
    assert server.take(greeting(b"CURVE") + command(hello)) == WRONG_KEY


def test_no_changed_byte_passes_a_handshake_with_keys():
    """Every byte of HELLO, WELCOME, INITIATE and READY, but the zeros that fill up a HELLO."""
    keys = Keys.new()
    sizes = {"server": (GREETING_BYTES, 2 + 200, 9 + 292), "client": (GREETING_BYTES, 170, 67)}
    for victim, (before, first, second) in sizes.items():
        for at in range(before, before + first + second):
            if victim == "server" and before + 2 + 8 <= at < before + 2 + 80:
                continue
            client, server = ours(keys, server=False), ours(keys, server=True)
            passed = bytearray()

            def change(data, at=at, passed=passed):
                begin = len(passed)
                passed += data
                if begin <= at < len(passed):
                    passed[at] ^= 0x10
                return [bytes(passed[begin:])]

            both = shake_hands(client, server, **{f"to_{victim}": change})
            noticed = both[victim == "server"]
            assert len(passed) > at, (victim, at)
            assert ("ready",) not in noticed, (victim, at)
            # A size that was changed may leave it waiting for more.
            faults = [event[1] for event in noticed if event[0] == "failed"]
            assert set(faults) <= {"wrong-key", "malformed", "too-large"}, (victim, at)


@pytest.mark.parametrize(("said", "events"), headers(0))
def test_headers_that_are_none(keys, said, events):
    _, server = joined(keys)
    assert server.take(said) == events


# By its header alone, where commands are no longer; `None`: when it has come as a whole.
@pytest.mark.parametrize(("most", "heard"), [(3, None), (2000, 9)])
def test_the_limit_of_frames_is_kept_but_by_commands(keys, most, heard):
    client, server = ours(keys, server=False), ours(keys, server=True, max_frame_bytes=most)
    shake_hands(client, server)
    sent = client.ping(1) + client.send([bytes(most)] * 2)
    assert server.take(sent) == [("message", [bytes(most)] * 2)]
    assert server.take(client.send([bytes(most + 1)])[:heard]) == TOO_LARGE


PONG_16 = b"\4PONG" + b"c" * 16
COMMANDS = [
    pytest.param(b"\4PING\0\1", [], b"\4PONG", id="ping"),
    pytest.param(b"\4PING\0\1" + b"c" * 16, [], PONG_16, id="ping-16"),
    pytest.param(b"\4PING\0\1" + b"c" * 17, MALFORMED, b"", id="ping-17"),
    pytest.param(b"\4PING\0", MALFORMED, b"", id="ping-short"),
    pytest.param(b"\4PONG" + b"c" * 16, [], b"", id="pong"),
    pytest.param(b"\4PONG", [], b"", id="pong-empty"),
    pytest.param(b"\5ERROR\x03400", [("failed", "refused", "400")], b"", id="error"),
    pytest.param(b"\5ERROR\x04400", MALFORMED, b"", id="error-short"),
    pytest.param(b"\x09SUBSCRIBEx", [], b"", id="another"),
    pytest.param(b"\0", MALFORMED, b"", id="no-name"),
    pytest.param(b"\5PING", MALFORMED, b"", id="half-a-name"),
    pytest.param(b"\1x" + bytes(LONGEST - 2), [], b"", id="the-longest"),
    pytest.param(b"\1x" + bytes(LONGEST - 1), TOO_LARGE, b"", id="too-long"),
]


@pytest.mark.parametrize(("body", "events", "answer"), COMMANDS)
def test_commands(body, events, answer):
    _, server = joined(None)
    assert server.take(command(body)) == events
    assert server.reply() == (command(answer) if answer else b"")


class Sealer:
    """A client's messages to a server of ours, sealed with the right key whatever they are."""

    def __init__(self, seeded):
        _, self.server = joined(Keys.new(), 2000)
        self._seeded = seeded
        self._key = seeded.session_key()
        self.count = 10

    def frame(self, inside, outer=0):
        self.count += 1
        counter = self.count.to_bytes(8, "big")
        box = self._seeded.seal(inside, b"CurveZMQMESSAGEC" + counter, self._key)
        body = b"\7MESSAGE" + counter + box
        return bytes([outer | 2]) + len(body).to_bytes(8, "big") + body


@pytest.fixture
def sealer():
    with Seeded() as seeded:
        yield Sealer(seeded)


@pytest.mark.parametrize(
    "wrong",
    [(b"\1a", 1), *((bytes([flags]), 0) for flags in (3, 4, 8, 0x80, 0xFF)), (b"\2", 0)],
)
def test_flags_within_and_without(sealer, wrong):
    server = sealer.server
    assert server.take(sealer.frame(b"\0one")) == [("message", [b"one"])]
    assert server.take(sealer.frame(b"\0two", outer=4)) == [("message", [b"two"])]
    assert server.take(sealer.frame(b"\1a") + sealer.frame(b"\0b")) == [("message", [b"a", b"b"])]
    assert server.take(sealer.frame(*wrong)) == MALFORMED


@pytest.mark.parametrize(("body", "events", "answer"), COMMANDS)
def test_sealed_commands(sealer, body, events, answer):
    assert sealer.server.take(sealer.frame(b"\2" + body)) == events
    assert len(sealer.server.reply()) == (2 + 33 + len(answer) if answer else 0)


def test_what_is_too_short_to_be_sealed():
    for nbytes in (0, 1, 8, 32):
        _, server = joined(Keys.new())
        assert server.take(bytes([0, nbytes])) == MALFORMED


def test_nonces_that_do_not_grow(sealer):
    sealer.count = (1 << 64) - 3
    assert sealer.server.take(sealer.frame(b"\0x")) == [("message", [b"x"])]
    sealer.count -= 1
    assert sealer.server.take(sealer.frame(b"\0x")) == MALFORMED


def test_what_was_heard_or_swapped_is_not_heard():
    for again in (0, 1):
        client, server = joined(Keys.new())
        frames = client.send([b"first"]), client.send([b"second"])
        assert server.take(frames[1] + frames[again]) == [("message", [b"second"]), *MALFORMED]
        assert server.take(client.send([b"later"])) == [], "who has failed is deaf"


def test_what_is_said_to_one_is_not_heard_by_another():
    keys = Keys.new()
    client, server = joined(keys)
    _, other = joined(keys)
    assert other.take(client.send([b"x"])) == WRONG_KEY, "another connection with the same keys"
    assert client.take(client.send([b"x"])) == WRONG_KEY, "its own, sent back"
    assert server.ready


def test_keys_have_their_length():
    for wrong in ((b"x" * 32, b"x" * 32), (b"x" * 32, b"x" * 31, b"x" * 32)):
        with pytest.raises(ValueError, match="32 bytes"):
            _zmtp.Zmtp(True, wrong, 100)


def test_closing_is_for_ever_and_who_is_not_ready_sends_nothing(keys):
    client, closed = joined(keys)
    sent = client.send([b"x"])
    closed.close()
    closed.close()
    assert closed.take(sent) == []
    for side in (ours(keys, server=False), closed):
        for send in (lambda side=side: side.send([b"x"]), lambda side=side: side.ping(1)):
            with pytest.raises(ValueError, match="follow the handshake"):
                send()
