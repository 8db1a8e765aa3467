"""The transport whose healthy messages Python never sees: the compiled loop moves them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from reducer import libzmq
from reducer.tcp_connections import wire_bytes
from reducer.wire.constants import HEADER_BYTES
from worker_client.protocol.spec import HEARTBEATS
from worker_client.runtime import _loop
from worker_client.runtime.transport import Completed, Transport

if TYPE_CHECKING:
    from reducer.wire.header import Buffer
    from worker_client.protocol import _flight
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import Heartbeats
    from worker_client.runtime.credentials import Keys
    from worker_client.runtime.transport import Event


class CompiledTransport(Transport):
    """Connections to all reducers of a job; see `worker_client.runtime.transport.Transport`.

    Raises:
        ConfigError: pyzmq's libzmq cannot be called directly.
    """

    any_thread = True

    @staticmethod
    def check() -> None:
        """Find out whether it can run here.

        Raises:
            ConfigError: it cannot; the message says why.
        """
        libzmq.addresses()

    def __init__(
        self,
        flight: _flight.CompiledFlight,
        io_threads: int,
        context: Any = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats = HEARTBEATS,
    ) -> None:
        super().__init__(io_threads, context, keys, heartbeats)
        self._flight = flight
        self._loop = _loop.Loop(flight, libzmq.addresses())

    def connect(self, address: str) -> None:
        super().connect(address)
        socket, monitor = self._links[-1]
        self._loop.add(socket.underlying, socket.fileno(), monitor.fileno())

    def _renew(self, link: int) -> None:
        super()._renew(link)
        socket, monitor = self._links[link]
        self._loop.replace(link, socket.underlying, socket.fileno(), monitor.fileno())

    def _taken(self, link: int) -> int:
        stats = self._flight.stats(link)  # of the results, which `events` does not tell of
        framing = wire_bytes((HEADER_BYTES, 1 << 10), self._frame_extra(link)) - (1 << 10)
        return super()._taken(link) + stats.bytes_received + framing * stats.results

    def _reads_for(self, link: int) -> bool:
        return self._flight.reads_for(link)

    def wait(self, timeout_s: float) -> None:
        """Take healthy results until something else happens or an all-reduce is done."""
        if not self._reached:
            self._loop.run(math.ceil(timeout_s * 1000))

    def events(self) -> list[Event]:
        completed, message, changed = self._loop.news()
        events = self._news()
        if completed:
            events.append(Completed(completed))
        if message is not None:
            events.append(self._tell(*message))
        if changed:
            for link in range(len(self._links)):
                events += self._changes(link)
        return events

    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        """Hand a message that is no contribution to libzmq."""
        self._send(link, [header] if payload is None else [header, bytes(payload)])
        self._loop.touch(link)

    def refill(self) -> None:
        self._loop.refill()

    def reads(self, operation: Operation) -> bool:
        return self._flight.reads(operation.sequence)

    def wake(self) -> None:
        self._loop.wake()
