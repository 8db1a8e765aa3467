"""Connections among the ranks of one node: Unix sockets, and what goes through them.

Every pair of ranks has two streams, so that what comes from the reducers can be handed round while
the next buffer is being gathered, and a third connection on which a rank says why it gives up. A
rank that ends closes its sockets, so the others know at once and by name; Gloo would say that a
connection was closed, or wait for its timeout. What is sent to it raises no SIGPIPE, whose default
action, to which a script may have set it, ends the process.
"""

from __future__ import annotations

import copy
import os
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from reducer.errors import (
    ConfigError,
    LocalProtocolError,
    RankLostError,
    ReductionTimeout,
    RemoteProtocolError,
)
from reducer.wire.constants import NO_SEQUENCE
from reducer.wire.messages import decode_error, encode_error
from worker_client.runtime.service_thread import close_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.errors import ReductionError

MESSAGE_BYTES = 8192  # of an agreement or a reason, so that nobody has to say how long it is
STREAMS = 2
CONNECT_S = 60.0
_ALARM = STREAMS  # its number among the three connections of a pair
_TICK_S = 0.1  # between two looks whether a rank gives up
_AT_ONCE = 1 << 20  # bytes for one call of the kernel
_HELLO = struct.Struct("<HH")  # local rank, number of the connection
_PEER = struct.Struct("3i")  # pid, uid, gid
_SEQUENCE = struct.Struct("<Q")


class NodeSockets:
    """The connections of one rank to the others of its node, which are in local-rank order."""

    def __init__(
        self, ranks: Sequence[int], local_rank: int, sockets: list[dict[int, socket.socket]]
    ) -> None:
        self.ranks = tuple(ranks)
        self.local_rank = local_rank
        self._streams, self._alarms = sockets[:STREAMS], sockets[_ALARM]
        self._failure: ReductionError | None = None
        self._stopped = False
        self._ended: set[int] = set()  # local ranks that have hung up
        self._lock = threading.Lock()  # one looks at alarms at a time
        for kind in sockets:
            for connection in kind.values():
                connection.setblocking(False)
        close_in_child(self, NodeSockets._descriptors)

    def exchange(
        self,
        stream: int,
        outgoing: Sequence[memoryview],
        incoming: Sequence[memoryview],
        until: float,
    ) -> None:
        """Send and receive at the same time; what is this rank's own in both lists is not touched.

        Args:
            stream: 0 or 1; one thread may use each.
            outgoing: bytes for every local rank.
            incoming: where to put what every local rank sends.
            until: when to give up, in seconds of the monotonic clock.

        Raises:
            RankLostError: a rank of the node has ended.
            ReductionTimeout: some have not sent or taken all; it names them.
            ReductionError: a rank of the node has said why it gives up.
            LocalProtocolError: `stop` was called.
        """
        sockets = self._streams[stream]
        out = {at: outgoing[at] for at in sockets if outgoing[at].nbytes}
        into = {at: incoming[at] for at in sockets if incoming[at].nbytes}
        while out or into:
            moved = [self._send(sockets[at], at, out) for at in list(out)]
            moved += [self._receive(sockets[at], at, into) for at in list(into)]
            if any(moved):
                continue
            self.check()
            if time.monotonic() > until:
                late = tuple(self.ranks[at] for at in sorted({*out, *into}))
                raise ReductionTimeout(
                    f"of the ranks of this node, {', '.join(map(str, late))} did not take part in "
                    "time",
                    missing=late,
                )
            ready = select.poll()
            for at in {*out, *into}:
                wanted = (select.POLLOUT if at in out else 0) | (select.POLLIN if at in into else 0)
                ready.register(sockets[at], wanted)
            ready.poll(1000 * min(_TICK_S, max(0.0, until - time.monotonic()) + 0.001))

    def agree(self, stream: int, message: bytes, until: float) -> list[bytes]:
        """Return what all ranks of this node say, in local-rank order; raises as `exchange`.

        A message has at most `MESSAGE_BYTES`, and no spaces at its end.
        """
        assert len(message) <= MESSAGE_BYTES, "the others could not tell where it ends"
        own = message.ljust(MESSAGE_BYTES)
        said = [bytearray(own) for _ in self.ranks]
        outgoing = [memoryview(own)] * len(said)
        self.exchange(stream, outgoing, [memoryview(one) for one in said], until)
        return [bytes(one).rstrip() for one in said]

    def give_up(self, error: ReductionError) -> None:
        """Tell the node's other ranks why this one takes part no longer; they fail likewise."""
        self._failure = self._failure or error
        reason = encode(error)
        for connection in self._alarms.values():
            with suppress(OSError):  # a rank that has ended needs no reason
                connection.send(reason, socket.MSG_NOSIGNAL)

    def check(self, *, everybody: bool = False) -> None:
        """Raise why a rank has given up, if one has, or that `stop` was called.

        With `everybody` also if a rank has ended, without a word; when all have what they need of
        each other, they may.
        """
        if self._stopped:
            raise LocalProtocolError("this client was shut down")
        with self._lock:
            if self._failure is None:
                self._failure = self._listen()
        if self._failure is not None:
            raise copy.copy(self._failure)
        if everybody and self._ended:
            raise self._end_of(min(self._ended))

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """Let threads that are in a call here leave it soon."""
        self._stopped = True

    def close(self) -> None:
        """Hang up, which the node's other ranks notice."""
        self.stop()
        for kind in (*self._streams, self._alarms):
            for connection in kind.values():
                connection.close()

    def _descriptors(self) -> list[int]:
        kinds = (*self._streams, self._alarms)
        numbers = (connection.fileno() for kind in kinds for connection in kind.values())
        return [number for number in numbers if number >= 0]

    def _listen(self) -> ReductionError | None:
        for at, connection in self._alarms.items():
            try:
                reason = connection.recv(MESSAGE_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                reason = b""
            if reason:  # a message this short comes whole
                return decode(reason)
            self._ended.add(at)
        return None

    def _send(self, connection: socket.socket, at: int, out: dict[int, memoryview]) -> bool:
        try:
            sent = connection.send(out[at][:_AT_ONCE], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            raise self._lost(at) from None
        _advance(out, at, sent)
        return True

    def _receive(self, connection: socket.socket, at: int, into: dict[int, memoryview]) -> bool:
        try:
            received = connection.recv_into(into[at][:_AT_ONCE])
        except BlockingIOError:
            return False
        except OSError:
            received = 0
        if not received:
            raise self._lost(at)
        _advance(into, at, received)
        return True

    def _lost(self, at: int) -> ReductionError:
        """Return why a rank has hung up: for a reason that it gave, or because it ended."""
        self.check()
        return self._end_of(at)

    def _end_of(self, at: int) -> ReductionError:
        rank = self.ranks[at]
        return RankLostError(f"rank {rank}, of this node, has ended or left", rank=rank)


def encode(error: ReductionError) -> bytes:
    """Return an error as a message for the other ranks of the node, all but its `name`."""
    sequence = NO_SEQUENCE if error.sequence is None else error.sequence
    return _SEQUENCE.pack(sequence) + encode_error(error)


def decode(message: bytes) -> ReductionError:
    """Return the error that `encode` was given, as it is at another rank, or why it cannot be."""
    (sequence,) = _SEQUENCE.unpack_from(message)
    try:
        return decode_error(message[_SEQUENCE.size :], sequence)
    except RemoteProtocolError as error:
        return error


def connect_node(
    ranks: Sequence[int],
    local_rank: int,
    share: Callable[[str], None],
    read: Callable[[int], str],
) -> NodeSockets:
    """Connect to the other ranks of this node.

    Args:
        ranks: of this node, in local-rank order.
        local_rank: of this process.
        share: publishes where this rank listens.
        read: waits for where a rank, as in `ranks`, listens, and returns it.

    Raises:
        ConfigError: a rank cannot be reached.
        ReductionTimeout: a rank did not come in time.
    """
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(STREAMS + 1)]
    with ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
        # A name that is no file: nothing stays of it when the process is killed.
        name = f"reduction-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen(len(sockets) * len(ranks))
        listener.settimeout(CONNECT_S)
        share(name)
        for at, rank in enumerate(ranks[:local_rank]):
            address = f"\0{read(rank)}"
            for kind, found in enumerate(sockets):
                found[at] = stack.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    found[at].connect(address)
                except OSError as error:
                    raise ConfigError(
                        f"rank {rank} seems to be on this node, but cannot be reached there "
                        f"({error}): set REDUCTION_HIERARCHY=off"
                    ) from None
                found[at].sendall(_HELLO.pack(local_rank, kind), socket.MSG_NOSIGNAL)
        while not all(len(found) == len(ranks) - 1 for found in sockets):
            try:
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_S)
                hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            except TimeoutError:
                known = {local_rank}.union(*sockets)
                missing = tuple(rank for at, rank in enumerate(ranks) if at not in known)
                raise ReductionTimeout(
                    f"of the ranks of this node, {missing} did not connect within {CONNECT_S:g} s",
                    missing=missing,
                ) from None
            if len(hello) != _HELLO.size or not _is_ours(connection):
                connection.close()
                continue
            at, kind = _HELLO.unpack(hello)
            sockets[kind][at] = stack.enter_context(connection)
        stack.pop_all()
    return NodeSockets(ranks, local_rank, sockets)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user: anybody here may connect to the name."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.getuid())


def _advance(views: dict[int, memoryview], at: int, nbytes: int) -> None:
    views[at] = views[at][nbytes:]
    if not views[at].nbytes:
        del views[at]
