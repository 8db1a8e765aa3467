"""A worker's flight and transport with failpoints around them.

They see what the loop leaves to Python; `loop.c` passes the places of the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from reducer.wire.constants import MessageType
from torture.failpoints import WORKER_LOOP, Place, arm_module, message_type
from worker_client.communicators import communicator
from worker_client.protocol._flight import CompiledFlight
from worker_client.protocol.session import Session
from worker_client.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.wire.header import Buffer
    from torture.failpoints import Failpoint
    from worker_client.protocol.operation import Operation


def install(failpoints: Sequence[Failpoint]) -> None:
    """Have the clients that this process makes from now on pass failpoints."""
    hit = {"_hit": staticmethod(arm_module(WORKER_LOOP, failpoints))}
    flight = type("FaultyFlight", (_FaultyFlight,), hit)
    transport = type("FaultyTransport", (_FaultyTransport,), hit)
    mock.patch.object(communicator, "Session", partial(Session, flight=flight)).start()
    mock.patch.object(communicator, "Transport", transport).start()


class _FaultyFlight(CompiledFlight):
    """A flight that passes failpoints with each result that Python gives it."""

    _hit: Callable[[Place], bool]

    def take(self, link: int, frame: Buffer, payload: Buffer, now: float) -> list[Operation] | None:
        completed = super().take(link, frame, payload, now)
        if completed is not None and message_type(frame) == MessageType.RESULT:
            self._hit(Place.WORKER_COPIED)
        for _ in completed or ():
            self._hit(Place.WORKER_COMPLETED)
        return completed


class _FaultyTransport(Transport):
    """A transport whose HELLOs pass failpoints."""

    _hit: Callable[[Place], bool]

    def send(self, link: int, header: bytes, payload: Buffer | None) -> None:
        if message_type(header) == MessageType.HELLO and self._hit(Place.WORKER_HELLO):
            return
        super().send(link, header, payload)
