"""The transport of the plain loop: one ROUTER socket of libzmq.

It is the executable proof that the wire is ZeroMQ's, and serves where nothing was compiled.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from reducer import tcp_connections
from reducer.engine.allow_list import LOCAL
from reducer.errors import ConfigError
from reducer.runtime.transport import (
    FOREIGN,
    HUNG_UP,
    LINGER_MS,
    OTHER_POOL,
    UNKNOWN_KEY,
    WITHOUT_KEY,
    Line,
    Load,
    Transport,
    explain_bind,
)
from reducer.tcp_connections import CURVE_FRAME_BYTES, wire_bytes
from reducer.wire.constants import (
    HEADER_BYTES,
    LONGEST_PATIENCE_MS,
    MAX_CHUNK_BYTES,
    REDUCER_HEARTBEAT_MS,
    TYPE_AT,
    MessageType,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    import numpy as np

    from reducer.keyfiles import KeyPair
    from reducer.runtime.keyring import Keyring
    from reducer.wire.header import Buffer

_RECEIVES_PER_POLL = 64  # so that a flood of messages cannot starve the clock
_COPY_BELOW = 1 << 16  # sharing a smaller payload costs more than copying it
_EVENT = struct.Struct("=HI")  # of a socket monitor: what happened; a descriptor, or the reason

LATE_LOOKS = 100  # of the guard, in which messages of a connection that has ended may be read

ZAP_DOMAIN = "reducer"  # what libzmq calls us when it asks whether to admit a key
_CHANGES = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_LIBC = ctypes.CDLL(None)  # of this process, and so libzmq's
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_REASONS = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: WITHOUT_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: OTHER_POOL,
}


def heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Let peers notice when this reducer is stopped, or the network is cut.

    The guard notices silent members, as each job has a patience of its own, and a socket one for
    all; libzmq ends only what nobody may be patient with.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, REDUCER_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LONGEST_PATIENCE_MS)


def make_context(
    io_threads: int, cpus: tuple[int, ...] | None = None
) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context of libzmq for one reducer.

    Args:
        io_threads: threads that move bytes.
        cpus: where these may run; anywhere if None.
    """
    context = zmq.Context(io_threads)
    for cpu in cpus or ():
        context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
    return context


@dataclass(slots=True, eq=False)
class PlainLine(tcp_connections.Reception, Line):
    """One connection that libzmq has accepted, as far as the kernel tells of it.

    libzmq takes what a peer sends and keeps what a peer does not read, in memory that it does not
    count. So what the kernel has passed on is compared with what the reducer has taken and given.

    Attributes:
        peers: what the transport knows of each.
        unsent: bytes that the reducer had given to it at the last look, and libzmq had not written.
        least: of what was given, less what was written: libzmq writes of its own, too.
    """

    peers: Mapping[bytes, Peer] = field(default_factory=dict)
    unsent: int = 0
    least: int = 0

    def load(self, peer: bytes | None, now: float) -> Load | None:
        """Return what the kernel and the transport know of it."""
        passed = tcp_connections.traffic(self.descriptor, self.name)
        if passed is None:
            return None
        if peer is None:
            return Load(passed.read, 0, 0, 0.0)
        its = self.peers.get(peer, _NOBODY)
        return self.weigh(passed, its.taken, its.given, now)

    def weigh(self, passed: tcp_connections.Traffic, taken: int, given: int, now: float) -> Load:
        """Find out what libzmq holds.

        Args:
            passed: between libzmq and the kernel.
            taken: by the reducer, bytes on the wire.
            given: by the reducer, likewise.
            now: seconds of a clock that stands still while this thread does not run.
        """
        progress = self.listen(passed, taken, now)
        self.least = min(self.least, given - passed.written)
        self.unsent = given - passed.written - self.least
        silent_s, far_s = self.silent_s, self.round_trip_s
        return Load(passed.read, self.unread, self.unsent, silent_s, progress, far_s)

    def end(self) -> bool:
        """End it under libzmq's hands, which then closes it."""
        return tcp_connections.end(self.descriptor, self.name)


@dataclass(slots=True)
class Peer:
    """What a transport knows of a peer.

    Attributes:
        connection: the number of its connection, from 1 in the order in which they came; 0 if it
            is in this process, or nobody can tell.
        taken, given: bytes on the wire, from it and to it.
        looks: of the guard since its connection has ended.
    """

    connection: int
    taken: int = 0
    given: int = 0
    looks: int = 0


_NOBODY = Peer(0)


class PlainTransport(Transport):
    """A bound ROUTER socket. One thread uses it.

    Args:
        endpoint: ``tcp://HOST:PORT``; port 0 takes a free one.
        context: libzmq's, see `make_context`; whoever made it destroys it.
        keyring: the reducer's keys, if peers must have some; the context's gate says which.
        max_chunk_bytes: the largest payload; who sends a larger one is disconnected.
        handshake_s: time for libzmq's handshake.

    Attributes:
        frame_extra: bytes that encryption adds to each frame.
        inproc: where workers of this process connect that use the same context; nothing is copied
            or sent through the kernel there.
        host, port: what the socket is bound to.

    Raises:
        ConfigError: the endpoint cannot be bound; the message says what to change.
    """

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring | None = None,
        *,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        handshake_s: float = 5.0,
    ) -> None:
        # libzmq numbers peers from a value of rand() on, which is the same in every process unless
        # that is seeded. Who knows the next number can end this process (SECURITY.md).
        _LIBC.srand(secrets.randbits(32))
        self._router = context.socket(zmq.ROUTER)
        self._monitor = context.socket(zmq.PAIR)
        try:
            # No payload is larger, and an honest peer's other messages are far smaller.
            self._router.setsockopt(zmq.MAXMSGSIZE, max_chunk_bytes + HEADER_BYTES)
            self._router.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))
            # What a connection that ends has not sent is freed after this. By default libzmq would
            # keep it until the peer reads it, and wait for that when the context is destroyed.
            self._router.setsockopt(zmq.LINGER, LINGER_MS)
            self._configure(ipv6="[" in endpoint)
            if keyring is not None:
                self._demand_keys(keyring.pair)
            self._watch(_CHANGES if keyring is None else _CHANGES | _FAILURES)
            self._bind(endpoint)
        except BaseException:
            self._close(linger_ms=0)
            raise
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[int, bytes] = {}  # whose each connection is
        self._open: dict[int, int] = {}  # connections by their descriptors
        self._accepted = 0
        self._changed: list[tuple[bool, int, int]] = []  # told by the monitor, not yet by `changes`
        self._refused: list[str] = []  # likewise, by `refusals`
        self.frame_extra = 0 if keyring is None else CURVE_FRAME_BYTES
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host, _, port = bound.removeprefix("tcp://").rpartition(":")
        self.port = int(port)
        self.inproc = f"inproc://reducer-{id(self)}"
        self._router.bind(self.inproc)
        self._shared: tuple[object, zmq.Frame] | None = None

    def limit(self, max_connections: int, max_open: int) -> None:
        """Do nothing: libzmq accepts any number, and the guard ends those that are too many."""

    def receive(self, timeout_s: float) -> Iterator[tuple[bytes, Buffer, Buffer, str]]:
        """Wait for messages and yield ``(peer, header frame, payload frame, key)`` of each.

        A message of three frames or more is no message of ours: it comes with an empty header. The
        key is known of a HELLO alone: the peer's public one, or `LOCAL` if it is in this process.
        """
        if not self._router.poll(int(timeout_s * 1000)):
            return
        for _ in range(_RECEIVES_PER_POLL):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            header = frames[0].buffer if 1 <= len(frames) <= 2 else b""
            payload = frames[1].buffer if len(frames) == 2 else b""
            self.note(peer.bytes, _source(frames), *map(len, frames))
            hello = len(header) > TYPE_AT and header[TYPE_AT] == MessageType.HELLO
            yield peer.bytes, header, payload, _key(frames[0]) if hello else ""

    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Hand a message to libzmq, which shares the payload's memory until it is sent.

        Returns:
            False if the peer is not connected any more.
        """
        frames: list[bytes | zmq.Frame] = [peer, header]
        if payload is not None:
            frames.append(self._frame(payload))
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in {errno.EHOSTUNREACH, errno.EAGAIN}:
                return False
            raise
        if (its := self._peers.get(peer)) is not None:
            sizes = [len(header)] if payload is None else [len(header), len(payload)]
            its.given += wire_bytes(sizes, self.frame_extra)
        return True

    def note(self, peer: bytes, descriptor: int, *sizes: int) -> None:
        """Take note of where a message came from, and of the sizes of its frames."""
        its = self._peers.get(peer) or self._meet(peer, descriptor)
        its.taken += wire_bytes(sizes, self.frame_extra)

    def connection(self, peer: bytes) -> int:
        """Return the number that `changes` gives a peer's connection; 0 if there is none."""
        its = self._peers.get(peer)
        return 0 if its is None else its.connection

    def hang_up(self, peer: bytes) -> None:
        """Do nothing: libzmq ends a connection within the process at the worker's end alone."""

    def changes(self, now: float) -> list[tuple[int, Line | None]]:
        """Say which connections came or went, as libzmq's monitor has told."""
        self._hear()
        changes: list[tuple[int, Line | None]] = []
        for came, descriptor, number in self._changed:
            if not came:
                changes.append((number, None))
            elif (name := tcp_connections.name(descriptor)) is not None:
                line = PlainLine(descriptor, name, now, now, 0.0, now, peers=self._peers)
                changes.append((number, line))
        self._changed = []
        return changes

    def refusals(self) -> list[str]:
        """Say why connections were refused for want of a key since the last call, for each one."""
        self._hear()
        refused, self._refused = self._refused, []
        return refused

    def forget(self, members: Container[bytes]) -> None:
        """Forget peers that are no members, and whose connections have been gone for a while."""
        here = set(self._open.values())
        for peer, its in list(self._peers.items()):
            if its.connection in here or peer in members:
                its.looks = 0
                continue
            its.looks += 1
            if its.looks > LATE_LOOKS:
                del self._peers[peer]
                self._owners.pop(its.connection, None)

    def close(self) -> None:
        """Send nothing more; the last messages have a moment to leave."""
        self._close(LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        # In this order: libzmq's thread would wait to tell a monitor that nobody reads.
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=linger_ms)

    def _demand_keys(self, pair: KeyPair) -> None:
        """Have libzmq encrypt, and ask the gate about every connection; without one, admit none."""
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret)
        self._router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _watch(self, events: int) -> None:
        # libzmq's thread waits when this queue is full, so it has no limit and is read often.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        endpoint = f"inproc://monitor-{id(self)}"
        self._router.monitor(endpoint, events)
        self._monitor.connect(endpoint)

    def _hear(self) -> None:
        """Read what the monitor has told."""
        while True:
            try:
                event, value = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event in {zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED}:
                if (gone := self._open.pop(value, None)) is not None:
                    self._changed.append((False, value, gone))
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted += 1
                    self._open[value] = self._accepted
                    self._changed.append((True, value, self._accepted))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused.append(UNKNOWN_KEY)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refused.append(_REASONS.get(value, FOREIGN))
            else:  # such as one that has noticed first that we demand a key
                self._refused.append(HUNG_UP)

    def _meet(self, peer: bytes, descriptor: int) -> Peer:
        """Find out over which connection a peer's first message has come."""
        self._hear()  # libzmq tells of a connection before it gives out what has come over it
        number = self._open.get(descriptor, 0)
        if number:
            # Of two peers with one descriptor, the first one's connection has ended: what it had
            # said was still to be read.
            if (former := self._owners.get(number)) is not None:
                self._peers[former].connection = 0
            self._owners[number] = peer
        its = self._peers[peer] = Peer(number)
        return its

    def _frame(self, payload: Buffer | np.ndarray) -> zmq.Frame:
        # The n sends of one result come one after the other and share one frame.
        if self._shared is None or self._shared[0] is not payload:
            self._shared = (payload, zmq.Frame(payload, copy=len(payload) < _COPY_BELOW))
        return self._shared[1]

    def _configure(self, *, ipv6: bool) -> None:
        router = self._router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unreachable peer is an error, not silence
        # The window bounds what waits here, in bytes; a mark in messages could only drop some.
        router.setsockopt(zmq.SNDHWM, 0)
        # Nor may one stop the reading of a connection: if its peer hangs up then, libzmq aborts
        # this process at the next heartbeat (an assertion in `out_event`). The guard looks on.
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.IPV6, int(ipv6))
        heartbeats(router)

    def _bind(self, endpoint: str) -> None:
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            said = error.strerror or ""
            raise ConfigError(explain_bind(endpoint, error.errno or 0, said)) from None


def _source(frames: Sequence[zmq.Frame]) -> int:
    """Return the descriptor of the connection over which a message came, -1 if there is none."""
    try:
        return int(frames[0].get("__fd"))
    except (IndexError, zmq.ZMQError):
        return -1


def _key(frame: zmq.Frame) -> str:
    """Return the public key of a message's sender; nothing if it has none, and no excuse."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        pass  # the socket demands no keys, or the peer is in this process
    try:
        frame.get("Peer-Address")
    except zmq.ZMQError:
        return LOCAL
    return ""
