"""The transport that needs nothing compiled: one DEALER socket of libzmq per reducer.

It is the executable proof that the wire is ZeroMQ's, and serves where nothing was compiled.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from reducer import tcp_connections
from reducer.clock import ServingTime, is_lost
from reducer.tcp_connections import CURVE_FRAME_BYTES, wire_bytes
from reducer.wire.constants import HEADER_BYTES, LONGEST_PATIENCE_MS, MAX_CHUNK_BYTES
from worker_client.protocol.spec import HEARTBEATS
from worker_client.runtime import credentials
from worker_client.runtime.credentials import Keys
from worker_client.runtime.service_thread import close_in_child
from worker_client.runtime.transport import (
    CONNECT_S,
    HANDSHAKE_S,
    LINGER_MS,
    LOOK_S,
    NO_REDUCER,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    SLAMMED,
    Connected,
    Disconnected,
    Event,
    Message,
    Refused,
    Transport,
    hung_up,
    silence,
)
from worker_client.runtime.zmtp_greeting import mechanism

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reducer.errors import AuthError
    from reducer.wire.header import Buffer
    from worker_client.protocol.flight import Flight
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import Heartbeats

_RECEIVES_PER_POLL = 64  # per reducer, so that none starves the others
_INPROC = "inproc://"
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class PlainTransport(Transport):
    """Connections to all reducers of a job, over libzmq; see `Transport`.

    Args:
        flight: what is sent, and where results go.
        io_threads: threads of libzmq that serve the connections.
        context: libzmq's context of a reducer in this process, to reach it at ``inproc://``.
        keys: what to show to reducers, and which to expect.
        heartbeats: how often to send some, and how long to be patient without any.
    """

    def __init__(
        self,
        flight: Flight,
        io_threads: int,
        context: Any = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        self._flight = flight
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
        self._reached: list[int] = []  # links whose sockets tell no story of their own
        self._waker = self._context.socket(zmq.PAIR)
        self._wakened = self._context.socket(zmq.PAIR)
        wake = f"inproc://wake-{id(self)}"
        self._wakened.bind(wake)
        self._waker.connect(wake)
        self._poller = zmq.Poller()
        self._poller.register(self._wakened, zmq.POLLIN)
        self._ready: dict[Any, int] = {}
        close_in_child(self, PlainTransport._descriptors)

    def connect(self, address: str) -> None:
        self._endpoints.append(address if address.startswith(_INPROC) else f"tcp://{address}")
        self._links.append(self._socket(len(self._links)))

    def reset(self, link: int) -> None:
        self._renew(link)
        self._refused.discard(link)

    def _renew(self, link: int) -> None:
        """Give a link another socket."""
        for socket in self._links[link]:
            self._poller.unregister(socket)
        _close(*self._links[link], linger_ms=0)
        self._links[link] = self._socket(link)

    def wait(self, timeout_s: float) -> None:
        timeout_ms = 0 if self._reached else math.ceil(max(0.0, timeout_s) * 1000)
        self._ready = dict(self._poller.poll(timeout_ms))

    def events(self) -> Iterator[Event]:
        reached, self._reached = self._reached, []
        yield from map(Connected, reached)
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
        frames = [header] if payload is None else [header, bytes(payload)]
        with contextlib.suppress(zmq.Again):
            self._links[link][0].send_multipart(frames, zmq.NOBLOCK)

    def refill(self) -> None:
        for send in self._flight.refill(time.monotonic()):
            self.send(*send)

    def detach(self, operation: Operation) -> None:
        """Do nothing: whatever libzmq sends is a copy."""

    def wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # a full pipe wakes as well as a fuller one
            self._waker.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        self._waker.close()
        self._wakened.close()
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
            (zmq.CONNECT_TIMEOUT, round(1000 * CONNECT_S)),
            (zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S)),
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
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return socket, monitor

    def listen(self) -> None:
        now = self._clock.now()
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        for link, line in self._lines.items():
            passed = tcp_connections.traffic(line.descriptor, line.name)
            if passed is not None:
                line.listen(passed, self._told.get(link, 0), now)
                if self._is_lost(line):
                    tcp_connections.end(line.descriptor, line.name)

    def _descriptors(self) -> list[int]:
        """Return those of all connections that libzmq has told of, unless it has closed them."""
        lines = self._lines.values()
        named = [(line.descriptor, tcp_connections.name(line.descriptor)) for line in lines]
        return [at for (at, name), line in zip(named, lines, strict=True) if name == line.name]

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
        return is_lost(line.silent_s, self._heartbeats.patience_s, line.round_trip_s)

    def _gone(self, link: int) -> Disconnected:
        """Say how a connection has ended, as far as that can be told."""
        line = self._lines.pop(link, None)
        if line is not None and self._is_lost(line):
            return Disconnected(link, silence(line.silent_s))
        return hung_up(link, self._clock.paused_s(), self._heartbeats.patience_s)

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
                gone = self._gone(link)
                self._renew(link)  # what was not sent is for nobody
                yield gone
            else:
                yield Disconnected(link, NO_REDUCER)

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
            if self._slammed[link] == SLAMMED:
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
