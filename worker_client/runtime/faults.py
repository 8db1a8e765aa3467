"""A worker's flight and transport with failpoints around them, for tests of failures.

They stand in for the real ones if a failpoint is set. With the compiled ones, `loop.c` passes the
places of what Python does not see.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from reducer.failpoints import Place, message_type
from reducer.wire.constants import MessageType
from worker_client.runtime.transport import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reducer.failpoints import Failpoint
    from reducer.wire.header import Buffer
    from worker_client.protocol.plain_flight import PlainFlight as _AnyFlight
    from worker_client.runtime.implementation import Implementation
    from worker_client.runtime.plain_transport import PlainTransport as _AnyTransport
    from worker_client.runtime.transport import Event
else:
    _AnyFlight = _AnyTransport = object  # the real one comes after these among the bases

log = logging.getLogger(__name__)


def around(chosen: Implementation, failpoints: Sequence[Failpoint]) -> Implementation:
    """Return twins of this implementation that pass these failpoints; itself if there are none."""
    hit = chosen.arm(failpoints)
    if not failpoints:
        return chosen
    log.warning("failpoints are set: %s", ", ".join(map(str, failpoints)))
    return chosen._replace(
        flight=_mixed(_FaultyFlight, chosen.flight, hit),
        transport=_mixed(_FaultyTransport, chosen.transport, hit),
    )


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
