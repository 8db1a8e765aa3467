"""The worker's end of the network: one DEALER socket per reducer (only here ZeroMQ is known).

`PlainTransport` moves every message in Python; `compiled_transport` has healthy ones moved by the
compiled loop.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from reducer import tcp_connections
from reducer.clock import ServingTime
from reducer.keyfiles import KeyPair
from reducer.tcp_connections import CURVE_FRAME_BYTES, wire_bytes
from reducer.wire.constants import HEADER_BYTES, LONGEST_PATIENCE_MS, MAX_CHUNK_BYTES
from worker_client.protocol.spec import HEARTBEATS
from worker_client.runtime import credentials
from worker_client.runtime.credentials import Keys
from worker_client.runtime.zmtp_greeting import mechanism

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reducer.errors import AuthError
    from reducer.wire.header import Buffer
    from worker_client.protocol.flight import Flight
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import Heartbeats

LOOK_S = 0.2  # how often to look when reducers were heard last
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000
LINGER_MS = 500  # for the farewell
_RECEIVES_PER_POLL = 64  # per reducer, so that none starves the others
_COPY_BELOW = 1 << 16  # sharing a smaller payload costs more than copying it
_SLAMMED = 3  # handshakes in a row that were ended without a word: not by chance

_INPROC = "inproc://"
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Connected(NamedTuple):
    """A reducer was reached."""

    link: int


class Disconnected(NamedTuple):
    """A reducer was lost; the transport keeps trying to reach it again."""

    link: int
    reason: str


class Refused(NamedTuple):
    """A reducer does not accept our key, or that we have none; nothing is tried before a reset."""

    link: int
    error: AuthError


class Released(NamedTuple):
    """Nothing that was sent over a link before it was reset is read from callers' memory now."""

    link: int


class Message(NamedTuple):
    """A reducer said something; the header frame is empty if it cannot be one of ours."""

    link: int
    header: Buffer
    payload: Buffer


class Completed(NamedTuple):
    """All results of these all-reduces are in their buffers."""

    sequences: list[int]


Event = Connected | Disconnected | Refused | Released | Message | Completed


def make_pair() -> KeyPair:
    """Return a new key pair of CURVE."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


class Transport(ABC):
    """Connections to all reducers of a job, and a way to wake up whoever polls them.

    One thread at a time uses it, but for `wake`. An event's `link` counts the connections in order.

    Args:
        io_threads: threads of libzmq that serve the connections.
        context: libzmq's context of a reducer in this process, to reach it at ``inproc://``.
        keys: what to show to reducers, and which to expect.
        heartbeats: how often to send some, and how long to be patient without any.

    Attributes:
        any_thread: whether any thread may use it in turn, even one that Ctrl-C interrupts.
    """

    any_thread = False  # pyzmq may be interrupted between the two frames of a message

    def __init__(
        self,
        io_threads: int,
        context: Any = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        self._keys = keys or Keys()
        self._heartbeats = heartbeats
        self._lines: dict[int, tcp_connections.Reception] = {}  # by link
        self._told: dict[int, int] = {}  # bytes on the wire of the messages told of, by link
        self._clock = ServingTime(time.monotonic)  # a worker that did not run could hear nobody
        self._looked = 0.0  # when `listen` looked last, by that clock
        self._slammed: dict[int, int] = {}  # links: handshakes that have failed in a row
        self._refused: set[int] = set()  # links whose sockets have given up
        self._shared = context is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context(io_threads)
        self._links: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._endpoints: list[str] = []
        self._leaving: set[int] = set()  # links that were reset and not released
        self._reached: list[int] = []  # links whose sockets tell no story of their own

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait for something to happen; at once after `wake`. An interrupt loses nothing."""

    @abstractmethod
    def events(self) -> Iterable[Event]:
        """Return what has happened; call it several times in `reducer.clock.MOST_S` seconds."""

    def connect(self, address: str) -> None:
        """Add a link to a reducer.

        Args:
            address: ``host:port``, or ``inproc://...`` of a reducer in this process.
        """
        self._endpoints.append(address if address.startswith(_INPROC) else f"tcp://{address}")
        self._links.append(self._socket(len(self._links)))

    def reset(self, link: int) -> None:
        """Close a link's connection, drop what it has not sent, and connect anew."""
        self._renew(link)
        self._refused.discard(link)
        self._leaving.add(link)

    def _renew(self, link: int) -> None:
        """Give a link another socket."""
        _close(*self._links[link], linger_ms=0)
        self._links[link] = self._socket(link)

    @property
    def leaving(self) -> bool:
        """Whether a `Released` is to come, which nothing announces: look often."""
        return bool(self._leaving)

    @abstractmethod
    def _reads_for(self, link: int) -> bool:
        """Whether what was sent over a link before it was reset is still read."""

    @abstractmethod
    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        """Hand a message to libzmq.

        A message to a reducer that is not connected is lost: a `Disconnected` is on its way.
        """

    @abstractmethod
    def refill(self) -> None:
        """Send the contributions that the windows have room for."""

    @abstractmethod
    def reads(self, operation: Operation) -> bool:
        """Whether a message that has not left yet lies in a failed all-reduce's buffer."""

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return at once. The caller sees to it that one thread calls at a time."""

    def close(self) -> None:
        """Give the last messages a moment to leave, then free everything."""
        for socket, monitor in self._links:
            _close(socket, monitor, LINGER_MS)
        if not self._shared:
            self._context.destroy(linger=LINGER_MS)

    def _socket(self, link: int) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        endpoint = self._endpoints[link]
        self._lines.pop(link, None)
        if endpoint.startswith(_INPROC):
            self._reached.append(link)
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            # With IMMEDIATE libzmq would drop what was received when a connection ends: between two
            # frames of a message, it aborts the process. So `_changes` drops what was not sent.
            (zmq.IMMEDIATE, 0),
            # The window bounds what waits here, in bytes. A full queue of results would stop libzmq
            # from reading, and so from seeing heartbeats, while the thread is busy elsewhere.
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_CHUNK_BYTES + HEADER_BYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.CONNECT_TIMEOUT, 2000),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.HEARTBEAT_IVL, round(1000 * self._heartbeats.every_s)),
            # libzmq counts the time in which this process does not run: `listen` judges before.
            (zmq.HEARTBEAT_TIMEOUT, LONGEST_PATIENCE_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        curve = None if endpoint.startswith(_INPROC) else self._keys.at(_address(endpoint))
        if curve is not None:
            secret = curve.secret.encode("ascii")
            socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server.encode("ascii"))
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        monitor = socket.get_monitor_socket(_WATCHED)
        socket.connect(endpoint)
        return socket, monitor

    def _send(self, link: int, frames: list[bytes | zmq.Frame]) -> None:
        with contextlib.suppress(zmq.Again):
            self._links[link][0].send_multipart(frames, zmq.NOBLOCK, copy=False)

    def listen(self) -> None:
        """Note when each reducer was heard last; close the connections to silent reducers.

        The driver calls it between events, several times in `reducer.clock.MOST_S`.
        """
        now = self._clock.now()
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        for link, line in self._lines.items():
            passed = tcp_connections.traffic(line.descriptor, line.name)
            if passed is not None:
                line.listen(passed, self._taken(link), now)
                if self._is_lost(line):
                    tcp_connections.end(line.descriptor, line.name)

    def _taken(self, link: int) -> int:
        """Return the bytes on the wire of all messages taken from a link, or a few more."""
        return self._told.get(link, 0)

    def _tell(self, link: int, header: Buffer, payload: Buffer) -> Message:
        """Count a message."""
        told = self._told.get(link, 0)
        self._told[link] = told + wire_bytes((len(header), len(payload)), self._frame_extra(link))
        return Message(link, header, payload)

    def _frame_extra(self, link: int) -> int:
        endpoint = self._endpoints[link]
        keyed = not endpoint.startswith(_INPROC) and self._keys.at(_address(endpoint)) is not None
        return CURVE_FRAME_BYTES if keyed else 0

    def _is_lost(self, line: tcp_connections.Reception) -> bool:
        return line.silent_s > self._heartbeats.patience_s

    def _why_gone(self, link: int) -> str:
        """Say how a connection has ended, as far as that can be told."""
        line = self._lines.pop(link, None)
        if line is not None and self._is_lost(line):
            return f"died or cannot be reached: no heartbeat for {line.silent_s:.1f} s"
        return "closed the connection, died or cannot be reached"

    def _news(self) -> list[Event]:
        if not self._reached and not self._leaving:
            return []
        reached, self._reached = self._reached, []
        released = [link for link in self._leaving if not self._reads_for(link)]
        self._leaving.difference_update(released)
        return [*map(Released, released), *map(Connected, reached)]

    def _messages(self, link: int, limit: int = sys.maxsize) -> Iterator[Event]:
        socket, _ = self._links[link]
        for _ in range(limit):
            if self._links[link][0] is not socket:
                return  # what came before has made somebody reset it
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            header = frames[0].buffer if len(frames) <= 2 else b""
            yield self._tell(link, header, frames[1].buffer if len(frames) == 2 else b"")

    def _changes(self, link: int) -> Iterator[Event]:
        _, monitor = self._links[link]
        while self._links[link][1] is monitor and monitor.poll(0):
            message = recv_monitor_message(monitor)
            event = message["event"]
            if event == zmq.EVENT_CONNECTED:
                if (name := tcp_connections.name(message["value"])) is not None:
                    # Before the handshake has ended no silence is one.
                    self._lines[link] = tcp_connections.Reception(
                        message["value"], name, looked=self._clock.now(), heard=math.inf
                    )
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._slammed.pop(link, None)
                if link in self._lines:
                    self._lines[link].heard = self._clock.now()
                yield Connected(link)
            elif link in self._refused:
                continue
            elif (error := self._refusal(link, event, message["value"])) is not None:
                self._refused.add(link)
                yield Refused(link, error)
            elif event == zmq.EVENT_DISCONNECTED:
                # What was said before the connection ended still counts: the last results.
                yield from self._messages(link)
                if self._links[link][1] is not monitor:
                    return
                why = self._why_gone(link)
                self._renew(link)  # what was not sent is for nobody
                yield Disconnected(link, why)
            else:
                yield Disconnected(link, "is not a reducer")

    def _refusal(self, link: int, event: int, value: int) -> AuthError | None:
        """Say what is wrong with our keys, if a failed handshake tells."""
        address = _address(self._endpoints[link])
        keyed = self._keys.at(address) is not None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return credentials.unknown(address)
        differs = value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and differs:
            return credentials.mechanism_differs(address, keyed=keyed)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # A reducer that finds a fault of ours before we do just closes the connection.
            self._slammed[link] = self._slammed.get(link, 0) + 1
            if self._slammed[link] == _SLAMMED:
                del self._slammed[link]
                return credentials.guess(address, mechanism(address), keyed=keyed)
        return None


def _address(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://")


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], linger_ms: int) -> None:
    # In this order: libzmq's thread would wait for ever to tell a monitor that nobody reads.
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)


class PlainTransport(Transport):
    """A transport that needs nothing compiled."""

    def __init__(
        self,
        flight: Flight,
        io_threads: int,
        context: Any = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        super().__init__(io_threads, context, keys, heartbeats)
        self._flight = flight
        # Per link, what libzmq sends out of the caller's memory: in the order of sending.
        self._unsent: list[deque[tuple[zmq.MessageTracker, object]]] = []
        self._left: list[deque[tuple[zmq.MessageTracker, object]]] = []  # before a reset
        self._waker = self._context.socket(zmq.PAIR)
        self._wakened = self._context.socket(zmq.PAIR)
        wake = f"inproc://wake-{id(self)}"
        self._wakened.bind(wake)
        self._waker.connect(wake)
        self._poller = zmq.Poller()
        self._poller.register(self._wakened, zmq.POLLIN)
        self._ready: dict[Any, int] = {}

    def connect(self, address: str) -> None:
        super().connect(address)
        self._unsent.append(deque())
        self._left.append(deque())
        for socket in self._links[-1]:
            self._poller.register(socket, zmq.POLLIN)

    def _renew(self, link: int) -> None:
        for socket in self._links[link]:
            self._poller.unregister(socket)
        super()._renew(link)
        for socket in self._links[link]:
            self._poller.register(socket, zmq.POLLIN)
        self._left[link] += self._unsent[link]
        self._unsent[link].clear()

    def wait(self, timeout_s: float) -> None:
        self._ready = dict(self._poller.poll(math.ceil(timeout_s * 1000) * (not self._reached)))

    def events(self) -> Iterator[Event]:
        self._forget_sent()
        yield from self._news()
        ready, self._ready = self._ready, {}
        if self._wakened in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._wakened.recv(zmq.NOBLOCK)
        for link, (socket, monitor) in enumerate(self._links):
            if socket in ready:
                yield from self._messages(link, _RECEIVES_PER_POLL)
            if monitor in ready:
                yield from self._changes(link)

    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        """Hand a message to libzmq, which reads the payload's memory until it is sent."""
        frames: list[bytes | zmq.Frame] = [header]
        if payload is not None and len(payload) < _COPY_BELOW:
            frames.append(zmq.Frame(payload, copy=True))
        elif payload is not None:
            frame = zmq.Frame(payload, copy=False, track=True)
            frames.append(frame)
            self._unsent[link].append((frame.tracker, memoryview(payload).obj))
        self._send(link, frames)

    def refill(self) -> None:
        for send in self._flight.refill(time.monotonic()):
            self.send(*send)

    def reads(self, operation: Operation) -> bool:
        self._forget_sent()
        mine = operation.view.obj
        sent = (*self._unsent, *self._left)
        return any(owner is mine for unsent in sent for _, owner in unsent)

    def _reads_for(self, link: int) -> bool:
        return bool(self._left[link])

    def wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # a full pipe wakes as well as a fuller one
            self._waker.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        self._waker.close()
        self._wakened.close()
        super().close()

    def _forget_sent(self) -> None:
        for unsent in (*self._unsent, *self._left):
            while unsent and unsent[0][0].done:
                unsent.popleft()
