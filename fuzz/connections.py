"""Target ``zmtp``: bytes of a peer, garbled conversations, and frames that no honest peer sends.

Every story is told twice: with flights of bytes that arrive whole, and cut anywhere. Nothing that
either side says or notices may differ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fuzz.seeded import Seeded
from fuzz.source import EDGES, Source, check
from tests.zmtp import _zmtp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.zmtp._zmtp import Event

MAX_FRAME_BYTES = 2000
_FAULTS = {
    *("foreign", "differs", "refused", "wrong-key", "unknown-key", "malformed", "too-large"),
}
_SIZES = (0, 1, 2, 100, 221, 222, 223, 255, 256, MAX_FRAME_BYTES)
_MECHANISMS = (b"NULL", b"CURVE", b"PLAIN", b"NULLNULLNULLNULLNULL")
_TYPES = (b"DEALER", b"ROUTER", b"REQ", b"REP", b"PUB", b"")
_NAMES = (b"\4PING", b"\4PONG", b"\5ERROR", b"\5READY", b"\x09SUBSCRIBE", b"\0", b"\xffPING", b"")


@lru_cache(maxsize=1)
def seeded() -> Seeded:
    """Return the chance of this process."""
    return Seeded()


class Side:
    """One side of a connection, and all that it has said and noticed.

    So many bytes of a flight as `cuts` say come at once, again and again; none: all of them.
    """

    def __init__(self, *, server: bool, curve: bool, cuts: bytes, admits: bool = True) -> None:
        self.name = "server" if server else "client"
        self._cuts = cuts
        self._admits = admits
        self.events: list[Event] = []
        self.said: list[bytes] = []
        server_key, _ = seeded().pair("server's")
        keys = (*seeded().pair(f"{self.name}'s"), server_key) if curve else None
        self.zmtp = _zmtp.Zmtp(server, keys, MAX_FRAME_BYTES)

    @property
    def failed(self) -> bool:
        """Whether it goes no further."""
        return bool(self.events) and self.events[-1][0] == "failed"

    def flight(self) -> bytes:
        """Return what it says now."""
        said = self.zmtp.reply()
        self.said.append(said)
        return said

    def take(self, flight: bytes) -> None:
        """Hear what the peer says."""
        seeded().side = self.name
        for piece in self._pieces(flight):
            events = self.zmtp.take(piece)
            while events and events[-1][0] == "admit":
                events += self.zmtp.admit(self._admits)
            self.events += events

    def _pieces(self, flight: bytes) -> Iterator[bytes]:
        at = 0
        for number in range(len(flight)):
            nbytes = 1 + self._cuts[number % len(self._cuts)] if self._cuts else len(flight)
            yield flight[at : at + nbytes]
            at += nbytes
            if at >= len(flight):
                return

    def look(self) -> None:
        """Check what was noticed, whatever came."""
        kinds = [event[0] for event in self.events]
        check(kinds.count("ready") <= 1, f"the handshake ends once: {kinds}")
        check(kinds.count("failed") <= 1, f"a connection fails once: {kinds}")
        check("failed" not in kinds[:-1], f"nothing follows a failure: {kinds}")
        before = kinds[: kinds.index("ready")] if "ready" in kinds else kinds
        check("message" not in before, f"messages follow the handshake: {kinds}")
        check(self.zmtp.ready == ("ready" in kinds), "ready is who has said so")
        for event in self.events:
            if event[0] == "message":
                check(all(len(frame) <= MAX_FRAME_BYTES for frame in event[1]), "frames fit")
            elif event[0] == "failed":
                check(event[1] in _FAULTS, f"{event[1]} is a fault")
                check(event[-1].isascii(), f"{event[-1]!r} can be shown")
                check(self.zmtp.take(b"\0\0") == [], "who has failed is deaf")


class Told(NamedTuple):
    """What is to be the same, however bytes arrive."""

    events: list[list[Event]]
    said: list[list[bytes]]


def run(data: bytes) -> None:
    """Tell a story twice."""
    with seeded():
        source = Source(data)
        story = source.pick((_any_bytes, _conversation, _any_frames))
        cuts = source.take(1 + source.below(4)) or b"\0"
        whole = story(Source(data[7:]), b"")
        cut = story(Source(data[7:]), cuts)
        check(whole == cut, f"cuts change nothing: {whole} and {cut}")


def _told(*sides: Side) -> Told:
    for side in sides:
        side.flight()
        side.look()
    return Told([side.events for side in sides], [side.said for side in sides])


def _any_bytes(source: Source, cuts: bytes) -> Told:
    """Say anything to one side, perhaps after a greeting."""
    seeded().restart()
    curve = source.chance(4)
    side = Side(server=source.chance(2), curve=curve, cuts=cuts)
    if source.chance(2):
        side.take(_greeting(source, b"CURVE" if curve else b"NULL"))
        if source.chance(2):
            side.take(_command(_ready(source)))
    while source.left:
        side.take(source.take(1 + source.byte()))
    return _told(side)


def _greeting(source: Source, mechanism: bytes) -> bytes:
    if source.chance(4):
        mechanism = source.pick(_MECHANISMS)
    version = bytes([3 + source.below(2), source.below(2)])
    greeting = b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0")
    return greeting + bytes([source.chance(8)]) + bytes(31)


def _ready(source: Source) -> bytes:
    body = b"\5READY"
    for _ in range(1 + source.below(3)):
        name = source.pick((b"Socket-Type", b"SOCKET-TYPE", b"Identity", b"", source.take(3)))
        value = source.pick(_TYPES)
        nbytes = source.number(32) if source.chance(8) else len(value)
        body += bytes([len(name)]) + name + nbytes.to_bytes(4, "big") + value
    return body


def _command(body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([4, len(body)]) + body
    return b"\6" + len(body).to_bytes(8, "big") + body


def _sides(source: Source, cuts: bytes) -> tuple[Side, Side, bool]:
    seeded().restart()
    curve = source.chance(3)
    client = Side(server=False, curve=curve, cuts=cuts)
    server = Side(server=True, curve=curve, cuts=cuts, admits=not source.chance(16))
    return client, server, curve


def _conversation(source: Source, cuts: bytes) -> Told:
    """Let two sides talk, and garble it on the way."""
    client, server, curve = _sides(source, cuts)
    honest = True
    sent: list[list[list[bytes]]] = [[], []]
    for turn in range(12):
        sender, receiver = (client, server) if turn % 2 == 0 else (server, client)
        said = sender.flight()
        if sender.zmtp.ready and not sender.failed:
            for _ in range(source.below(3)):
                if source.chance(4):
                    said += sender.zmtp.ping(source.byte())
                    continue
                frames = [
                    (b"%d %d %d" % (turn, len(sent[turn % 2]), number)).ljust(size)[:size]
                    for number in range(1 + source.below(3))
                    for size in (source.pick(_SIZES),)
                ]
                sent[turn % 2].append(frames)
                said += sender.zmtp.send(frames)
        heard = _garble(said, source) if source.chance(4) else said
        honest &= heard == said
        receiver.take(heard)
    if honest and not client.failed and not server.failed:
        for side, frames_sent in ((server, sent[0]), (client, sent[1])):
            heard_frames = [event[1] for event in side.events if event[0] == "message"]
            check(side.zmtp.ready, f"an honest conversation begins: {side.events}")
            check(heard_frames == frames_sent, "what was sent is heard")
    if curve:
        for side, messages in ((server, sent[0]), (client, sent[1])):
            frames_sent_in_order = iter([frame for message in messages for frame in message])
            frames_heard = (
                frame for event in side.events if event[0] == "message" for frame in event[1]
            )
            check(
                all(frame in frames_sent_in_order for frame in frames_heard),
                "whatever is sealed is heard once, in its order, as it was sent",
            )
    if honest:
        faults = {side.events[-1][1] for side in (client, server) if side.failed}
        check(faults <= {"unknown-key", "refused"}, f"honest sides understand: {faults}")
    return _told(client, server)


def _garble(said: bytes, source: Source) -> bytes:
    """Change a flight so that it differs whatever the keys are."""
    changed = bytearray(said)
    at = 0 if source.chance(4) else int.from_bytes(source.take(2), "big") % (len(changed) + 1)
    kind = source.below(6)
    if kind == 0 and at < len(changed):
        changed[at] ^= 1 + source.below(255)
    elif kind == 1:
        del changed[at : at + 1 + source.below(9)]
    elif kind == 2:
        changed[at:at] = source.take(1 + source.below(9))
    elif kind == 3:
        changed += changed[at:]  # again
    elif kind == 4:
        changed[:] = changed[at:] + changed[:at]
    elif kind == 5:
        del changed[at:]
    return bytes(changed)


def _any_frames(source: Source, cuts: bytes) -> Told:
    """Say any frames after an honest handshake, sealed with the right key if there are keys."""
    client, server, curve = _sides(source, b"")
    for _ in range(4):
        server.take(client.flight())
        client.take(server.flight())
    if not (client.zmtp.ready and server.zmtp.ready):
        return _told(client, server)
    victim = source.pick((client, server))
    victim._cuts = cuts
    prefix = b"CurveZMQMESSAGEC" if victim is server else b"CurveZMQMESSAGES"
    key = seeded().session_key() if curve else b""
    count = 8
    while source.left and not victim.failed:
        body = _body(source)
        if curve:
            count += 1 if not source.chance(16) else source.number(8) - 3
            counter = max(count, 0).to_bytes(8, "big")
            flags = bytes([source.pick((0, 0, 0, 1, 2, 2, 2, 3, source.byte()))])
            body = b"\7MESSAGE" + counter + seeded().seal(flags + body, prefix + counter, key)
            if source.chance(16):
                body = _garble(body, source)
        flags_out = source.pick((0, 4, 0, 4, 0, 4, 1, 5, source.byte()))
        nbytes = source.pick(EDGES) if source.chance(16) else len(body)
        if nbytes < 256 and not source.chance(4):
            header = bytes([flags_out & ~2, nbytes])
        else:
            header = bytes([flags_out | 2]) + nbytes.to_bytes(8, "big")
        victim.take(header + body)
    return _told(client, server)


def _body(source: Source) -> bytes:
    if source.chance(3):
        return bytes(source.pick(_SIZES) + source.below(2))
    filler = bytes(source.pick((0, 1, 2, 3, 18, 19, 300, 1024, 1100)))
    return source.pick(_NAMES) + source.take(source.below(8)) + filler
