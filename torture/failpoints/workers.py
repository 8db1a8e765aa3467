"""A worker's flight and transport with failpoints around them.

With the compiled ones, `loop.c` passes the places of what Python does not see.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

from reducer.wire.constants import MessageType
from torture.failpoints import WORKER_LOOP, Place, arm, arm_module, message_type
from worker_client.runtime import implementation
from worker_client.runtime.transport import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reducer.wire.header import Buffer
    from torture.failpoints import Failpoint
    from worker_client.protocol.plain_flight import PlainFlight as _AnyFlight
    from worker_client.runtime.implementation import Implementation
    from worker_client.runtime.plain_transport import PlainTransport as _AnyTransport
    from worker_client.runtime.transport import Event
else:
    _AnyFlight = _AnyTransport = object  # the real one comes after these among the bases


def install(failpoints: Sequence[Failpoint]) -> None:
    """Have the clients that this process makes from now on pass failpoints."""
    select = implementation.select

    def select_faulty(name: str | None) -> Implementation:
        chosen = select(name)
        compiled = chosen.name == "compiled"
        hit = arm_module(WORKER_LOOP, failpoints) if compiled else arm(failpoints)
        return chosen._replace(
            flight=_mixed(_FaultyFlight, chosen.flight, hit),
            transport=_mixed(_FaultyTransport, chosen.transport, hit),
        )

    mock.patch.object(implementation, "select", select_faulty).start()


def _mixed(faulty: type, real: Any, hit: Callable[[Place], bool]) -> Any:
    return type(faulty.__name__, (faulty, real), {"_hit": staticmethod(hit)})


class _FaultyFlight(_AnyFlight):
    """A flight that passes failpoints with each result that Python gives it."""

    _hit: Callable[[Place], bool]

    def take(self, link: int, frame: Buffer, payload: Buffer, now: float) -> list[int] | None:
        completed = super().take(link, frame, payload, now)
        if completed is not None and message_type(frame) == MessageType.RESULT:
            self._hit(Place.WORKER_COPIED)
        for _ in completed or ():
            self._hit(Place.WORKER_COMPLETED)
        return completed


class _FaultyTransport(_AnyTransport):
    """A transport whose messages, as far as Python sees them, pass failpoints."""

    _hit: Callable[[Place], bool]

    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        sent = message_type(header)
        if sent == MessageType.HELLO and self._hit(Place.WORKER_HELLO):
            return
        contribution = sent == MessageType.CONTRIBUTION
        if contribution and self._hit(Place.WORKER_BEFORE_SEND):
            return
        super().send(link, header, payload)
        if contribution:
            self._hit(Place.WORKER_AFTER_SEND)

    def _messages(self, link: int, limit: int = sys.maxsize) -> Iterator[Event]:
        for event in super()._messages(link, limit):
            result = isinstance(event, Message) and message_type(event.header) == MessageType.RESULT
            if not (result and self._hit(Place.WORKER_RECEIVED)):
                yield event
