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
from reducer.clock import SPARE_ROUND_TRIPS, IdleTime, ServingTime, is_lost
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
    timed_out,
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
# A quarter of failover.ADOPT_S at most: a rank that waits for any reducer tries each several times.
RECONNECT_MS, RECONNECT_MAX_MS = 50, 500
CONNECT_S, HANDSHAKE_S = 2.0, 5.0  # for TCP's handshake, and for that and ZMTP's
LOOKUP_S = 1.0  # in which a name server that is well answers
LINGER_MS = 500  # for the farewell
SLAMMED = 3  # handshakes in a row that were ended without a word: not by chance

log = logging.getLogger(__name__)

_DENIED = "400"  # what a server of ZMTP says to a client whose key it does not admit


@dataclass(slots=True, eq=False)
class _Route:
    """The way to one reducer, over a line of the loop: a link's first one, or another one.

    Attributes:
        link: of the flight.
        address: ``host:port``, or an endpoint in this process.
        opening: header and payload of the message with which another one begins.
        resumes: the line whose connection is to go on over this one; None of a further stream.
        attempts: how often that was asked for of this line's own, since it was made.
        until: when that must be done.
        carries: of a further stream: the reducer has agreed to that.
        fewer: the log has said that the link has fewer streams than asked for.
        socket: of the connection, or of the attempt to make one; None in this process.
        place: where it leads.
        places: addresses of that name that are yet to be tried.
        asked: the name is being resolved.
        unresolved: why that has failed; "" if it has not.
        since: when the attempt began.
        retry_at: when to begin another one; never while there is a connection.
        delay_s: how long to wait after the next attempt that fails.
        slammed: handshakes in a row that were ended without a word.
        idle_time: the reducer's; None before the handshake is done.
        idle_s: how long it has lasted, once that was too long.
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
    unresolved: str = ""
    since: float = 0.0
    retry_at: float = 0.0
    delay_s: float = RECONNECT_MS / 1000
    slammed: int = 0
    idle_time: IdleTime | None = None
    idle_s: float = 0.0


class Transport:
    """Connections to all reducers of a job.

    The thread that leads its core uses it.

    Args:
        flight: what is sent, and where results go.
        context: of the reducer that this process hosts, to reach it without a socket.
        keys: what to show to reducers, and which to expect.
        heartbeats: how often to send some, and how long to be patient without any.
        port: where all that reducers send meets, if that is known.

    Attributes:
        core: moves its messages; any thread may submit to it.
    """

    def __init__(
        self,
        flight: _flight.CompiledFlight,
        context: Mapping[str, Callable[[], object]] | None = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
        port: tcp_connections.Port | None = None,
    ) -> None:
        self._inside = context or {}
        self._keys = keys or Keys()
        self._peer_timeout_s = heartbeats.peer_timeout_s
        self._port = port or tcp_connections.Port()
        self._loop = _loop.Loop(flight, heartbeats.every_s)
        self.core = _loop.Core(flight, self._loop)
        self._routes: list[_Route] = []  # of all lines
        self._lines: list[list[int]] = []  # of each link: the first one, and further streams
        self._resumable: dict[int, _Resumable] = {}  # links whose connections go on when they break
        self._successors: dict[int, int] = {}  # lines over which those of others go on
        self._tries = False  # an attempt to connect is in progress
        self._next_try = 0.0  # when the next one begins
        self._resolved: list[tuple[_Route, list[tuple[int, Any]]]] = []  # by threads, for this one
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
        self._routes.append(_Route(link, address))
        self._mind(time.monotonic())

    def make_resumable(self, link: int, resumption: Resumption) -> None:
        """Have a link's connections go on over others when they break, until the link ends.

        Args:
            link: that the reducer has welcomed.
            resumption: what the others begin with.
        """
        main = self._lines[link][0]
        if self._routes[main].socket is not None:
            far_s = SPARE_ROUND_TRIPS * self.round_trip_s(link)
            self._resumable[link] = _Resumable(resumption, RESUME_S + far_s)
            self._loop.make_resumable(main)

    def add_streams(self, link: int, header: bytes, payloads: Sequence[bytes]) -> None:
        """Give a link further streams, until its first connection ends.

        Args:
            link: whose first connection the reducer has welcomed.
            header: of the messages with which they begin.
            payloads: of these, one for each.
        """
        lines = self._lines[link]
        main = self._routes[lines[0]]
        if main.socket is None or main.place is None:
            return  # no network lies between
        while len(lines) <= len(payloads):
            lines.append(self._loop.add(link))
            self._routes.append(_Route(link, main.address))
        for line, payload in zip(lines[1:], payloads, strict=False):
            self._hang_up(line)
            route = self._routes[line]
            route.opening, route.places, route.retry_at = (header, payload), [main.place], 0.0
        self._mind(time.monotonic())

    def reset(self, link: int) -> None:
        """Close a link's connections, drop what they have not sent, and connect anew.

        Nothing that was sent over it is read from callers' memory after this.
        """
        route = self._routes[self._lines[link][0]]
        self._end(link)
        route.places, route.slammed, route.delay_s = None, 0, RECONNECT_MS / 1000
        route.retry_at = 0.0
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
            route = self._routes[line]
            if route.opening is None or route.carries:
                yield Message(route.link, header, payload)
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
        self._share_port()
        for line, route in enumerate(self._routes):
            if route.idle_time is None or route.socket is None or route.idle_s:
                continue
            read, partial = self._loop.received(line)
            idle_s = route.idle_time.listen(read, now, partial=partial)
            far_s = (
                tcp_connections.round_trip_s(route.socket) if idle_s > self._peer_timeout_s else 0.0
            )
            if is_lost(idle_s, self._peer_timeout_s, far_s) and not _unread(route.socket):
                route.idle_s = idle_s
                with contextlib.suppress(OSError):  # it has just ended by itself
                    route.socket.shutdown(
                        socket.SHUT_RDWR
                    )  # the loop sees that, after what has come

    def _share_port(self) -> None:
        """Bound what reducers send at once to what the switch's port has room for."""
        if self._port.nbytes:
            sockets = [route.socket for route in self._routes if route.socket is not None]
            window = self._port.window(len(sockets))
            for connection in sockets:
                tcp_connections.bound(connection, window)

    def round_trip_s(self, link: int) -> float:
        """Return the shortest round trip of a link's connection, seconds; 0 if nobody knows."""
        route = self._routes[self._lines[link][0]]
        return 0.0 if route.socket is None else tcp_connections.round_trip_s(route.socket)

    def unresolved(self, link: int) -> str:
        """Say why a reducer's name has no address yet; "" if it has. Any thread may ask."""
        route = self._routes[self._lines[link][0]]
        late = route.asked and time.monotonic() - route.since > LOOKUP_S
        return route.unresolved or ("the name server does not answer" if late else "")

    def close(self) -> None:
        """Give the last messages a moment to leave, then free everything."""
        self._loop.end(LINGER_MS)
        for route in self._routes:
            if route.socket is not None:
                route.socket.close()
                route.socket = None

    # -- connections --------------------------------------------------------------------------

    def _descriptors(self) -> list[int]:
        """Return those of all connections, and of attempts to make one."""
        return [route.socket.fileno() for route in self._routes if route.socket is not None]

    def _changed(self, change: _loop.LineChange) -> Iterator[Event]:
        """Say what a change means, and connect anew if that is to be done."""
        line, route = change.line, self._routes[change.line]
        link = route.link
        self._tries = True  # look whether one still is
        if change.suspended:
            self._begin_resumption(line)
            return
        if change.ready:
            route.slammed, route.delay_s = 0, RECONNECT_MS / 1000
            route.places = None
            route.idle_time, route.idle_s = IdleTime(self._clock.now()), 0.0
            route.since = math.inf
            if route.opening is None:
                yield Connected(link)
            else:
                self._loop.send(line, *route.opening)
            return
        if route.opening is not None:
            self._stream_ended(line, change.error)
            return
        tried = self._loop.connected(line)
        self._end(link)
        if change.shook:
            route.retry_at = 0.0
            if route.idle_s:
                yield Disconnected(link, timed_out(route.idle_s))
            else:
                yield hung_up(link, self._loop.paused_s(), self._peer_timeout_s)
            return
        if tried and (error := self._refusal(route, change)) is not None:
            route.retry_at = math.inf  # nothing is tried before a reset
            yield Refused(link, error)
            return
        self._try_later(route)
        if tried:
            yield Disconnected(link, NO_REDUCER)

    def _stream_ended(self, line: int, error: int) -> None:
        """Go on without a further stream, if no STREAM was sent over it; else end the link."""
        route = self._routes[line]
        lines, spoke = (
            self._lines[route.link],
            route.carries or (route.idle_time and route.resumes is None),
        )
        self._hang_up(line)
        if not spoke:
            self._try_later(route, error)
            return
        main = self._routes[lines[0]]
        main.idle_s = main.idle_s or route.idle_s
        for other in lines:
            self._loop.break_(other)  # when what has come is read; the link ends with the first one

    def _begin_resumption(self, line: int) -> None:
        """Begin to go on with a connection whose socket has broken, over a fresh one."""
        route = self._routes[line]
        resumable = self._resumable.get(route.link)
        if resumable is None or route.idle_s or route.place is None:
            self._loop.break_(line)
            return
        if line not in self._successors:
            self._successors[line] = self._loop.add(route.link, apart=True)
            self._routes.append(_Route(route.link, route.address))
        successor = self._routes[self._successors[line]]
        if successor.resumes is not None:
            return  # it is about to
        route.idle_time = None  # nothing can come
        successor.opening = self._resume(line, resumable.resumption)
        successor.resumes, successor.places, successor.retry_at = line, [route.place], 0.0
        now = time.monotonic()
        successor.until = now + resumable.most_s
        self._mind(now)

    def _resume(self, line: int, resumption: Resumption) -> tuple[bytes, bytes]:
        """Return the next RESUME for a line whose connection has broken."""
        route = self._routes[line]
        route.attempts += 1
        read, _ = self._loop.received(line)
        return resumption.message(self._lines[route.link].index(line), route.attempts, read)

    def _resumed(self, line: int, broken: int, header: bytes) -> None:
        """Go on with a broken connection over a fresh line, as the reducer agrees to."""
        route = self._routes[line]
        resumed = self._loop.resume_over(broken, line, Header.unpack(header).offset)
        self._hang_up(line)
        if not resumed:
            self._give_up(route)
            return
        route.resumes = None
        self._routes[broken].idle_time = IdleTime(self._clock.now())
        log.info("a connection to reducer %s broke, and goes on over another one", route.address)

    def _give_up(self, route: _Route) -> None:
        """Have the connection end that was to go on over this one."""
        if route.resumes is not None:
            self._loop.break_(route.resumes)
        route.resumes, route.retry_at = None, math.inf

    def _answered(self, line: int, header: bytes, payload: bytes) -> None:
        """Take a reducer's answer to what another connection of a link began with."""
        route = self._routes[line]
        kind = header[TYPE_AT : TYPE_AT + 1]
        if route.resumes is not None:
            if kind == bytes([MessageType.RESUME]):
                self._resumed(line, route.resumes, header)
            else:
                self._hang_up(line)
                self._give_up(route)
            return
        if kind == bytes([MessageType.STREAM]):
            route.carries = True
            self._loop.carry(line)
            if route.link in self._resumable:
                self._loop.make_resumable(line)
            return
        with contextlib.suppress(ReductionError):  # else it is no ERROR, or none that makes sense
            self._say_fewer(route, str(decode_error(payload)))
        self._hang_up(line)

    def _say_fewer(self, route: _Route, why: str) -> None:
        """Say once that a link goes on with fewer streams than it was to have."""
        main = self._routes[self._lines[route.link][0]]
        if not main.fewer:
            main.fewer = True
            log.warning("reducer %s has fewer streams than it was to have: %s", route.address, why)

    def _refusal(self, route: _Route, change: _loop.LineChange) -> AuthError | None:
        """Say what is wrong with our keys, if a failed handshake tells."""
        keyed = self._keys.at(route.address) is not None
        if change.fault == _loop.Fault.REFUSED and change.reason.startswith(_DENIED):
            return credentials.unknown(route.address)
        if change.fault == _loop.Fault.DIFFERS:
            return credentials.guess(route.address, change.mechanism, keyed=keyed)
        # A reducer that cannot open what we have encrypted just closes the connection.
        if keyed and change.mechanism == "CURVE":
            route.slammed += 1
            if route.slammed == SLAMMED or change.fault == _loop.Fault.WRONG_KEY:
                route.slammed = 0
                return credentials.guess(route.address, change.mechanism, keyed=keyed)
        return None

    def _mind_if_due(self, now: float) -> None:
        if self._tries or self._resolved or now >= self._next_try:
            self._mind(now)

    def _mind(self, now: float) -> None:
        """Begin the attempts that are due, and end those that take too long."""
        while self._resolved:
            route, places = self._resolved.pop()
            route.places, route.asked = places, False
        for line, route in enumerate(self._routes):
            if route.socket is not None:
                most_s = HANDSHAKE_S if self._loop.connected(line) else CONNECT_S
                if now - route.since > most_s or (route.resumes is not None and now > route.until):
                    self._hang_up(line)
                    self._try_later(route)
            elif route.retry_at <= now and not route.asked:
                self._try(line, route, now)
        self._tries = any(
            route.socket is not None and route.idle_time is None for route in self._routes
        )
        self._next_try = min(
            (route.retry_at for route in self._routes if not route.asked), default=math.inf
        )

    def _try(self, line: int, route: _Route, now: float) -> None:
        """Begin to connect, or to find out where to."""
        if route.address in self._inside:
            self._connect_inproc(line, route)
            return
        if not route.places:
            route.places = self._resolve(route)
        if not route.places:
            return
        family, place = route.place = route.places.pop(0)
        route.since, route.retry_at = now, math.inf
        try:
            route.socket = made = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (found := made.connect_ex(place)) not in {0, errno.EINPROGRESS}:
                raise OSError(found, os.strerror(found))
            self._loop.open(line, made.fileno(), _raw(self._keys.at(route.address)))
        except OSError as error:  # nobody listens there, or there are no files left
            log.debug("no connection to %s: %s", route.address, error)
            self._hang_up(line)
            self._try_later(route)

    def _connect_inproc(self, line: int, route: _Route) -> None:
        """Connect to a reducer of this process, which answers at once if it can."""
        route.retry_at = math.inf
        try:
            self._loop.join(line, self._inside[route.address]())
        except OSError as error:
            log.debug("no connection to %s: %s", route.address, error)
            self._try_later(route)

    def _resolve(self, route: _Route) -> list[tuple[int, Any]] | None:
        """Return where an address is; None if a thread of its own is to ask for a name."""
        try:
            return _lookup(route.address, socket.AI_NUMERICHOST)
        except OSError:
            route.asked, route.since = True, time.monotonic()

        def ask() -> None:
            try:
                places, route.unresolved = _lookup(route.address), ""
            except OSError as error:
                log.debug("%s has no address: %s", route.address, error)
                route.unresolved = error.strerror or str(error)
                places = []  # the name is gone, or nobody answers: later again
                route.retry_at = time.monotonic() + RECONNECT_MAX_MS / 1000
            self._resolved.append((route, places))
            self.core.call()

        threading.Thread(target=ask, name="resolve", daemon=True).start()
        return None

    def _try_later(self, route: _Route, error: int = 0) -> None:
        """Set the time of the next attempt: at once while the name has further addresses.

        Args:
            route: whose.
            error: errno of the latest one, 0 if there is none.
        """
        if route.resumes is not None and route.place is not None:
            route.opening = self._resume(route.resumes, self._resumable[route.link].resumption)
            route.places, route.retry_at = [route.place], time.monotonic() + RECONNECT_MS / 1000
            if (
                route.retry_at > route.until or error == errno.ECONNREFUSED
            ):  # nobody is there any more
                self._give_up(route)
            return
        if route.places:
            route.retry_at = 0.0
            return
        if route.opening is not None:  # no more are tried until the reducer welcomes the link anew
            self._say_fewer(route, "a connection was closed, or not made in time")
            return
        route.retry_at = time.monotonic() + route.delay_s * self._random.uniform(0.5, 1.5)
        route.delay_s = min(2 * route.delay_s, RECONNECT_MAX_MS / 1000)

    def _end(self, link: int) -> None:
        """Close all connections of a link; the reducer has to welcome it before it has streams."""
        self._resumable.pop(link, None)
        for line in self._lines[link]:
            if (its := self._routes[line].socket) is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    its.shutdown(socket.SHUT_RDWR)  # a forked child may have it open still
            self._hang_up(line)

    def _hang_up(self, line: int) -> None:
        route = self._routes[line]
        if line in self._successors:
            self._routes[self._successors[line]].resumes = None
            self._hang_up(self._successors[line])
        self._loop.close(line)
        if route.socket is not None:
            route.socket.close()
        route.socket = route.idle_time = None
        route.carries = False
        route.retry_at = math.inf


class _Resumable(NamedTuple):
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
