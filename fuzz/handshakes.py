"""Target ``handshake``: HELLO and its answer between a real session and a real engine, garbled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fuzz.headers import mutate
from fuzz.source import Source, check
from fuzz.twins import NAMES, Twin
from reducer.errors import ReductionError, VersionError
from reducer.wire.constants import MessageType
from reducer.wire.header import Header
from reducer.wire.messages import decode_error
from worker_client.protocol.flight import Send
from worker_client.protocol.session import Session
from worker_client.protocol.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

M = MessageType
PEERS = (b"\0one1", b"\0two2")
ANEW = (b"\1one1", b"\1two2")  # a new connection has another name


def run(data: bytes) -> None:
    """Let two ranks join with either implementation; what they and the reducer say is garbled."""
    for name in NAMES:
        _Handshake(Source(data), name).run()


class _Handshake:
    """Two ranks and one reducer."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._twin = Twin(name, 64 << 20)
        self._touched = False  # whether anything was changed on its way so far
        self._sessions = [
            Session(JobSpec("job", 0, rank, 2, ("here:1",), 4096, 64)) for rank in range(2)
        ]

    def run(self) -> None:
        """Say HELLO and hear the answers, then say it again, untouched, where it was refused."""
        for rank in range(2):
            self._join(rank, PEERS[rank], self._garble)
        for rank, session in enumerate(self._sessions):
            if not self._touched:
                check(session.joined, f"rank {rank} has joined: {session.refusal}")
            if session.refusal is not None:
                check(isinstance(session.refusal, ReductionError), "a refusal says why")
        for peer in PEERS:
            self._twin.perform(self._twin.engine.unreachable(peer))
        for now in (10.0, 20.0):
            self._twin.perform(self._twin.engine.tick(now))
        check(self._twin.engine.jobs == [], "who has gone is forgotten")
        self._join_anew()

    def _join_anew(self) -> None:
        for session in self._sessions:
            session.disconnected(0, "was cut")
        for rank in range(2):
            self._join(rank, ANEW[rank], lambda frame, payload: (frame, payload))
            check(self._sessions[rank].joined, f"rank {rank} joins when nothing is garbled")

    def _join(
        self, rank: int, peer: bytes, garble: Callable[[bytes, bytes], tuple[bytes, bytes]]
    ) -> None:
        session = self._sessions[rank]
        (hello,) = (a for a in session.connected(0) if isinstance(a, Send))
        said = hello.header, bytes(hello.payload or b"")
        heard = garble(*said)
        self._touched |= heard != said
        for _, header, body in self._twin.perform(self._twin.receive(peer, *heard)):
            answer = header, bytes(b"" if body is None else body)
            self._check(answer)
            garbled = garble(*answer)
            self._touched |= garbled != answer
            session.receive(0, *garbled, 0.0)

    def _check(self, answer: tuple[bytes, bytes]) -> None:
        header = Header.unpack(answer[0])
        if header.type is M.ERROR:
            error = decode_error(answer[1])
            check(self._touched, f"an honest HELLO is welcome: {error!r}")
            if isinstance(error, VersionError):
                check(error.got != error.expected, "a version is refused that differs")
        else:
            check(header.type in {M.WELCOME, M.PING}, f"{header.type.name} answers no HELLO")

    def _garble(self, frame: bytes, payload: bytes) -> tuple[bytes, bytes]:
        source = self._source
        kind = source.below(8)
        if kind == 1:
            frame = mutate(Header.unpack(frame), source).pack()
        elif kind == 2:
            frame = _flip(frame, source)
        elif kind == 3:
            payload = _flip(payload, source)
        elif kind == 4:
            values = json.loads(payload) if payload else {}
            names_ = sorted(values) or [""]
            values[source.pick(names_)] = source.pick((None, -1, 0, 1, 1 << 40, "x", [], {}, 1.5))
            payload = json.dumps(values).encode()
        elif kind == 5:
            frame, payload = frame[: source.byte()], payload[: source.byte()]
        elif kind == 6:
            frame, payload = source.take(source.below(100)), source.take(source.below(100))
        return frame, payload


def _flip(data: bytes, source: Source) -> bytes:
    changed = bytearray(data)
    for _ in range(1 + source.below(4) if changed else 0):
        changed[source.byte() % len(changed)] = source.byte()
    return bytes(changed)
