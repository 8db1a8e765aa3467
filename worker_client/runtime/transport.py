"""The worker's end of the network: connections to each reducer, and what comes over them as events.

The compiled loop moves healthy messages, which Python never sees. What is rare is here: making
connections, going on over others when they break, and noticing that a reducer is silent. All of it
acts on one table, the ways of the loop's lines; so it is one module.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reducer import tcp_connections
from reducer.clock import SPARE_ROUND_TRIPS, ServingTime, Silence, is_lost
from reducer.errors import ReductionError
from reducer.wire.constants import RESUME_S, TYPE_AT, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import decode_error
from reducer.zmtp import z85
from reducer.zmtp._keys import public_of
from worker_client.protocol.spec import HEARTBEATS
from worker_client.runtime import _loop, credentials
from worker_client.runtime.credentials import Keys
from worker_client.runtime.events import (
    NO_REDUCER,
    Completed,
    Connected,
    Disconnected,
    Event,
    Message,
    Refused,
    hung_up,
    silence,
)
from worker_client.runtime.service_thread import close_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reducer.errors import AuthError
    from reducer.wire.header import Buffer
    from worker_client.protocol import _flight
    from worker_client.protocol.flight import Resumption
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import Heartbeats
    from worker_client.runtime.credentials import Curve

LOOK_S = 0.2  # how often to look when reducers were heard last
# A quarter of losses.ADOPT_S at most: whoever waits for any reducer tries each one several times.
RECONNECT_MS, RECONNECT_MAX_MS = 50, 500
CONNECT_S, HANDSHAKE_S = 2.0, 5.0  # for TCP's handshake, and for that and ZMTP's
LINGER_MS = 500  # for the farewell
SLAMMED = 3  # handshakes in a row that were ended without a word: not by chance

log = logging.getLogger(__name__)

_DENIED = "400"  # what a server of ZMTP says to a client whose key it does not admit


@dataclass(slots=True, eq=False)
class _Way:
    """The way to one reducer, over a line of the loop: a link's first one, or another one.

    Attributes:
        link: of the flight.
        address: ``host:port``, or an endpoint in this process.
        opening: header and payload of the message with which another one begins.
        resumes: the line whose connection is to go on over this one; None of a further stream.
        attempts: how often that was asked for of this line's own, since it was made.
        until: when that must be done.
        carries: of a further stream: the reducer has agreed to that.
        fewer: of a link's first one: that others were not made was said.
        socket: of the connection, or of the attempt to make one; None in this process.
        place: where it leads.
        places: addresses of that name that are yet to be tried.
        asked: the name is being resolved.
        since: when the attempt began.
        retry_at: when to begin another one; never while there is a connection.
        delay_s: how long to wait after the next attempt that fails.
        slammed: handshakes in a row that were ended without a word.
        silence: the reducer's; None before the handshake is done.
        silent_s: how long it has lasted, once that was too long.
    """

    link: int
    address: str
    opening: tuple[bytes, bytes] | None = None
    resumes: int | None = None
    attempts: int = 0
    until: float = 0.0
    carries: bool = False
    fewer: bool = False
    socket: socket.socket | None = None
    place: tuple[int, Any] | None = None
    places: list[tuple[int, Any]] | None = None
    asked: bool = False
    since: float = 0.0
    retry_at: float = 0.0
    delay_s: float = RECONNECT_MS / 1000
    slammed: int = 0
    silence: Silence | None = None
    silent_s: float = 0.0


class Transport:
    """Connections to all reducers of a job.

    Whoever has the lead of its core uses it.

    Args:
        flight: what is sent, and where results go.
        context: of the reducer that this process hosts, to reach it without a socket.
        keys: what to show to reducers, and which to expect.
        heartbeats: how often to send some, and how long to be patient without any.

    Attributes:
        core: moves its messages; any thread may submit to it.
    """

    def __init__(
        self,
        flight: _flight.CompiledFlight,
        context: Mapping[str, Callable[[], object]] | None = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        self._inside = context or {}
        self._keys = keys or Keys()
        self._patience_s = heartbeats.patience_s
        self._loop = _loop.Loop(flight, heartbeats.every_s)
        self.core = _loop.Core(flight, self._loop)
        self._ways: list[_Way] = []  # of all lines
        self._lines: list[list[int]] = []  # of each link: the first one, and further streams
        self._kept: dict[int, _Kept] = {}  # links whose connections go on when they break
        self._fresh: dict[int, int] = {}  # lines over which those of others go on
        self._tries = False  # an attempt to connect is in progress
        self._next_try = 0.0  # when the next one begins
        self._resolved: list[tuple[_Way, list[tuple[int, Any]]]] = []  # by threads, for this one
        self._clock = ServingTime(time.monotonic)  # a worker that did not run could hear nobody
        self._looked = 0.0  # when `listen` looked last, by that clock
        # Not the module's own, whose numbers may be a user's training.
        self._random = random.Random()  # noqa: S311 (of no secret)
        close_in_child(self, Transport._descriptors)

    def connect(self, address: str) -> None:
        """Add a link to a reducer, and connect to it until that succeeds.

        Args:
            address: ``host:port``, or the endpoint of a reducer in this process.
        """
        link = len(self._lines)
        self._lines.append([self._loop.add(link)])
        self._ways.append(_Way(link, address))
        self._mind(time.monotonic())

    def keep(self, link: int, resumption: Resumption) -> None:
        """Have a link's connections go on over others when they break, until the link ends.

        Args:
            link: that the reducer has welcomed.
            resumption: what the others begin with.
        """
        main = self._lines[link][0]
        if self._ways[main].socket is not None:
            far_s = SPARE_ROUND_TRIPS * self.round_trip_s(link)
            self._kept[link] = _Kept(resumption, RESUME_S + far_s)
            self._loop.keep(main)

    def add_streams(self, link: int, header: bytes, payloads: Sequence[bytes]) -> None:
        """Give a link further streams, until its first connection ends.

        Args:
            link: whose first connection the reducer has welcomed.
            header: of the messages with which they begin.
            payloads: of these, one for each.
        """
        lines = self._lines[link]
        main = self._ways[lines[0]]
        if main.socket is None or main.place is None:
            return  # no network lies between
        while len(lines) <= len(payloads):
            lines.append(self._loop.add(link))
            self._ways.append(_Way(link, main.address))
        for line, payload in zip(lines[1:], payloads, strict=False):
            self._hang_up(line)
            way = self._ways[line]
            way.opening, way.places, way.retry_at = (header, payload), [main.place], 0.0
        self._mind(time.monotonic())

    def reset(self, link: int) -> None:
        """Close a link's connections, drop what they have not sent, and connect anew.

        Nothing that was sent over it is read from callers' memory after this.
        """
        way = self._ways[self._lines[link][0]]
        self._end(link)
        way.places, way.slammed, way.delay_s = None, 0, RECONNECT_MS / 1000
        way.retry_at = 0.0
        self._mind(time.monotonic())

    def wait(self, timeout_s: float) -> None:
        """Take healthy results until something else happens or an all-reduce is done.

        It returns at once after the core's `call`. An interrupt loses nothing.
        """
        now = time.monotonic()
        self._mind_if_due(now)
        self.core.run(max(0.0, min(timeout_s, self._next_try - now)))

    def events(self) -> Iterable[Event]:
        """Return what has happened; call it several times in `reducer.clock.MOST_S` seconds."""
        completed, message, changes = self.core.news()
        if message is None and not changes:
            return (Completed(completed),) if completed else ()
        return self._rare_events(completed, message)

    def _rare_events(
        self, completed: list[Operation], message: tuple[int, bytes, bytes] | None
    ) -> Iterator[Event]:
        if completed:
            yield Completed(completed)
        if message is not None:
            line, header, payload = message
            way = self._ways[line]
            if way.opening is None or way.carries:
                yield Message(way.link, header, payload)
            else:
                self._answered(line, header, payload)
        while (change := self._loop.change()) is not None:
            yield from self._changed(change)

    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        """Send a message, of which nothing is read from the caller's memory after this.

        A message to a reducer that is not connected is lost: a `Disconnected` is on its way.
        """
        self._loop.send(self._lines[link][0], header, payload)

    def refill(self) -> None:
        """Send the contributions that the windows have room for."""
        self._loop.refill()

    def detach(self, operation: Operation) -> None:
        """Read the buffer of a failed all-reduce no more."""
        self._loop.detach(operation.sequence)

    def listen(self) -> None:
        """Note when each reducer was heard last; close the connections to silent reducers.

        The driver calls it between events, several times in `reducer.clock.MOST_S`.
        """
        self._mind_if_due(time.monotonic())  # who leads a steady job never waits here
        now = self._clock.now()
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        for line, way in enumerate(self._ways):
            if way.silence is None or way.socket is None or way.silent_s:
                continue
            read, partial = self._loop.received(line)
            silent_s = way.silence.listen(read, now, partial=partial)
            far_s = tcp_connections.round_trip_s(way.socket) if silent_s > self._patience_s else 0.0
            if is_lost(silent_s, self._patience_s, far_s) and not _unread(way.socket):
                way.silent_s = silent_s
                with contextlib.suppress(OSError):  # it has just ended by itself
                    way.socket.shutdown(socket.SHUT_RDWR)  # the loop sees that, after what has come

    def round_trip_s(self, link: int) -> float:
        """Return the shortest round trip of a link's connection, seconds; 0 if nobody knows."""
        way = self._ways[self._lines[link][0]]
        return 0.0 if way.socket is None else tcp_connections.round_trip_s(way.socket)

    def close(self) -> None:
        """Give the last messages a moment to leave, then free everything."""
        self._loop.end(LINGER_MS)
        for way in self._ways:
            if way.socket is not None:
                way.socket.close()
                way.socket = None

    # -- connections --------------------------------------------------------------------------

    def _descriptors(self) -> list[int]:
        """Return those of all connections, and of attempts to make one."""
        return [way.socket.fileno() for way in self._ways if way.socket is not None]

    def _changed(self, change: _loop.Change) -> Iterator[Event]:
        """Say what a change means, and connect anew if that is to be done."""
        line, way = change.line, self._ways[change.line]
        link = way.link
        self._tries = True  # look whether one still is
        if change.suspended:
            self._go_on(line)
            return
        if change.ready:
            way.slammed, way.delay_s = 0, RECONNECT_MS / 1000
            way.places = None
            way.silence, way.silent_s = Silence(self._clock.now()), 0.0
            way.since = math.inf
            if way.opening is None:
                yield Connected(link)
            else:
                self._loop.send(line, *way.opening)
            return
        if way.opening is not None:
            self._stream_ended(line, change.error)
            return
        tried = self._loop.connected(line)
        self._end(link)
        if change.shook:
            way.retry_at = 0.0
            if way.silent_s:
                yield Disconnected(link, silence(way.silent_s))
            else:
                yield hung_up(link, self._loop.paused_s(), self._patience_s)
            return
        if tried and (error := self._refusal(way, change)) is not None:
            way.retry_at = math.inf  # nothing is tried before a reset
            yield Refused(link, error)
            return
        self._try_later(way)
        if tried:
            yield Disconnected(link, NO_REDUCER)

    def _stream_ended(self, line: int, error: int) -> None:
        """Go on without a further stream, if no STREAM was sent over it; else end the link."""
        way = self._ways[line]
        lines, spoke = self._lines[way.link], way.carries or (way.silence and way.resumes is None)
        self._hang_up(line)
        if not spoke:
            self._try_later(way, error)
            return
        main = self._ways[lines[0]]
        main.silent_s = main.silent_s or way.silent_s
        for other in lines:
            self._loop.break_(other)  # when what has come is read; the link ends with the first one

    def _go_on(self, line: int) -> None:
        """Begin to go on with a connection whose socket has broken, over a fresh one."""
        way = self._ways[line]
        kept = self._kept.get(way.link)
        if kept is None or way.silent_s or way.place is None:
            self._loop.break_(line)
            return
        if line not in self._fresh:
            self._fresh[line] = self._loop.add(way.link, apart=True)
            self._ways.append(_Way(way.link, way.address))
        fresh = self._ways[self._fresh[line]]
        if fresh.resumes is not None:
            return  # it is about to
        way.silence = None  # nothing can come
        fresh.opening = self._resume(line, kept.resumption)
        fresh.resumes, fresh.places, fresh.retry_at = line, [way.place], 0.0
        now = time.monotonic()
        fresh.until = now + kept.most_s
        self._mind(now)

    def _resume(self, line: int, resumption: Resumption) -> tuple[bytes, bytes]:
        """Return the next RESUME for a line whose connection has broken."""
        way = self._ways[line]
        way.attempts += 1
        read, _ = self._loop.received(line)
        return resumption.message(self._lines[way.link].index(line), way.attempts, read)

    def _resumed(self, line: int, broken: int, header: bytes) -> None:
        """Go on with a broken connection over a fresh line, as the reducer agrees to."""
        way = self._ways[line]
        spliced = self._loop.splice(broken, line, Header.unpack(header).offset)
        self._hang_up(line)
        if not spliced:
            self._give_up(way)
            return
        way.resumes = None
        self._ways[broken].silence = Silence(self._clock.now())
        log.info("a connection to reducer %s broke, and goes on over another one", way.address)

    def _give_up(self, way: _Way) -> None:
        """Have the connection end that was to go on over this one."""
        if way.resumes is not None:
            self._loop.break_(way.resumes)
        way.resumes, way.retry_at = None, math.inf

    def _answered(self, line: int, header: bytes, payload: bytes) -> None:
        """Take a reducer's answer to what another connection of a link began with."""
        way = self._ways[line]
        kind = header[TYPE_AT : TYPE_AT + 1]
        if way.resumes is not None:
            if kind == bytes([MessageType.RESUME]):
                self._resumed(line, way.resumes, header)
            else:
                self._hang_up(line)
                self._give_up(way)
            return
        if kind == bytes([MessageType.STREAM]):
            way.carries = True
            self._loop.carry(line)
            if way.link in self._kept:
                self._loop.keep(line)
            return
        with contextlib.suppress(ReductionError):  # else it is no ERROR, or none that makes sense
            self._say_fewer(way, str(decode_error(payload)))
        self._hang_up(line)

    def _say_fewer(self, way: _Way, why: str) -> None:
        """Say once that a link goes on with fewer streams than it was to have."""
        main = self._ways[self._lines[way.link][0]]
        if not main.fewer:
            main.fewer = True
            log.warning("reducer %s has fewer streams than it was to have: %s", way.address, why)

    def _refusal(self, way: _Way, change: _loop.Change) -> AuthError | None:
        """Say what is wrong with our keys, if a failed handshake tells."""
        keyed = self._keys.at(way.address) is not None
        if change.fault == _loop.Fault.REFUSED and change.reason.startswith(_DENIED):
            return credentials.unknown(way.address)
        if change.fault == _loop.Fault.DIFFERS:
            return credentials.guess(way.address, change.mechanism, keyed=keyed)
        # A reducer that cannot open what we have encrypted just closes the connection.
        if keyed and change.mechanism == "CURVE":
            way.slammed += 1
            if way.slammed == SLAMMED or change.fault == _loop.Fault.WRONG_KEY:
                way.slammed = 0
                return credentials.guess(way.address, change.mechanism, keyed=keyed)
        return None

    def _mind_if_due(self, now: float) -> None:
        if self._tries or self._resolved or now >= self._next_try:
            self._mind(now)

    def _mind(self, now: float) -> None:
        """Begin the attempts that are due, and end those that take too long."""
        while self._resolved:
            way, places = self._resolved.pop()
            way.places, way.asked = places, False
        for line, way in enumerate(self._ways):
            if way.socket is not None:
                most_s = HANDSHAKE_S if self._loop.connected(line) else CONNECT_S
                if now - way.since > most_s or (way.resumes is not None and now > way.until):
                    self._hang_up(line)
                    self._try_later(way)
            elif way.retry_at <= now and not way.asked:
                self._try(line, way, now)
        self._tries = any(way.socket is not None and way.silence is None for way in self._ways)
        self._next_try = min(
            (way.retry_at for way in self._ways if not way.asked), default=math.inf
        )

    def _try(self, line: int, way: _Way, now: float) -> None:
        """Begin to connect, or to find out where to."""
        if way.address in self._inside:
            self._meet(line, way)
            return
        if not way.places:
            way.places = self._resolve(way)
        if not way.places:
            return
        family, place = way.place = way.places.pop(0)
        way.since, way.retry_at = now, math.inf
        try:
            way.socket = made = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (found := made.connect_ex(place)) not in {0, errno.EINPROGRESS}:
                raise OSError(found, os.strerror(found))
            self._loop.open(line, made.fileno(), _raw(self._keys.at(way.address)))
        except OSError as error:  # nobody listens there, or there are no files left
            log.debug("no connection to %s: %s", way.address, error)
            self._hang_up(line)
            self._try_later(way)

    def _meet(self, line: int, way: _Way) -> None:
        """Connect to a reducer of this process, which answers at once if it can."""
        way.retry_at = math.inf
        try:
            self._loop.join(line, self._inside[way.address]())
        except OSError as error:
            log.debug("no connection to %s: %s", way.address, error)
            self._try_later(way)

    def _resolve(self, way: _Way) -> list[tuple[int, Any]] | None:
        """Return where an address is; None if a thread of its own is to ask for a name."""
        try:
            return _lookup(way.address, socket.AI_NUMERICHOST)
        except OSError:
            way.asked = True

        def ask() -> None:
            try:
                places = _lookup(way.address)
            except OSError as error:
                log.debug("%s has no address: %s", way.address, error)
                places = []  # the name is gone, or nobody answers: later again
                way.retry_at = time.monotonic() + RECONNECT_MAX_MS / 1000
            self._resolved.append((way, places))
            self.core.call()

        threading.Thread(target=ask, name="resolve", daemon=True).start()
        return None

    def _try_later(self, way: _Way, error: int = 0) -> None:
        """Set the time of the next attempt: at once while the name has further addresses.

        Args:
            way: whose.
            error: errno of the latest one, 0 if there is none.
        """
        if way.resumes is not None and way.place is not None:
            way.opening = self._resume(way.resumes, self._kept[way.link].resumption)
            way.places, way.retry_at = [way.place], time.monotonic() + RECONNECT_MS / 1000
            if way.retry_at > way.until or error == errno.ECONNREFUSED:  # nobody is there any more
                self._give_up(way)
            return
        if way.places:
            way.retry_at = 0.0
            return
        if way.opening is not None:  # no more are tried until the reducer welcomes the link anew
            self._say_fewer(way, "a connection was closed, or not made in time")
            return
        way.retry_at = time.monotonic() + way.delay_s * self._random.uniform(0.5, 1.5)
        way.delay_s = min(2 * way.delay_s, RECONNECT_MAX_MS / 1000)

    def _end(self, link: int) -> None:
        """Close all connections of a link; the reducer has to welcome it before it has streams."""
        self._kept.pop(link, None)
        for line in self._lines[link]:
            if (its := self._ways[line].socket) is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    its.shutdown(socket.SHUT_RDWR)  # a forked child may have it open still
            self._hang_up(line)

    def _hang_up(self, line: int) -> None:
        way = self._ways[line]
        if line in self._fresh:
            self._ways[self._fresh[line]].resumes = None
            self._hang_up(self._fresh[line])
        self._loop.close(line)
        if way.socket is not None:
            way.socket.close()
        way.socket = way.silence = None
        way.carries = False
        way.retry_at = math.inf


class _Kept(NamedTuple):
    """How a link's connections go on when they break.

    Attributes:
        resumption: what the others begin with.
        most_s: how long that may take.
    """

    resumption: Resumption
    most_s: float


def _lookup(address: str, flags: int = 0) -> list[tuple[int, Any]]:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]


def _raw(curve: Curve | None) -> tuple[bytes, bytes, bytes] | None:
    """Return a pair, and the reducer's public key, as bytes."""
    if curve is None:
        return None
    secret = z85.decode(curve.secret)
    return public_of(secret), secret, z85.decode(curve.server)


def _unread(connection: socket.socket) -> bool:
    """Whether something has come that nobody has read."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
