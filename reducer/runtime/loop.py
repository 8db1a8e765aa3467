"""The loop of a reducer's thread: what arrives goes to the engine, what it answers is sent.

`_loop.pyx` is the compiled twin, which takes healthy contributions by itself and without the GIL.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reducer.clock import ServingTime
from reducer.engine.actions import Close, Send
from reducer.engine.limits import TAKEN_PER_LOOK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.engine.actions import Action
    from reducer.engine.engine import Engine
    from reducer.runtime.guard import Guard
    from reducer.runtime.plain_transport import PlainTransport


class Loop:
    """Joins one engine, one transport and its guard. One thread uses it.

    Attributes:
        clock: by which peers are late.
    """

    def __init__(self, engine: Engine, transport: PlainTransport, guard: Guard) -> None:
        self._engine = engine
        self._transport = transport
        self._guard = guard
        self.clock = ServingTime(time.monotonic)

    def step(self, timeout_s: float) -> None:
        """Serve for `timeout_s` seconds at most, or until a peer is to be closed.

        Until then some messages are taken all the same: the guard counts on that. Then the engine
        sees the clock.
        """
        for number, message in enumerate(self._transport.receive(timeout_s), 1):
            self.do(self._engine.receive(*message, at=time.monotonic()))
            if self._guard.closing and number >= TAKEN_PER_LOOK:
                break
        self.do(self._engine.tick(self.clock.now()))

    def do(self, actions: Iterable[Action]) -> None:
        """Do what the engine asks for; it hears of peers that turn out to be gone."""
        # In the engine's order, also when a thousand ranks turn out to be gone at once.
        while actions:
            further: list[Action] = []
            for action in actions:
                if not isinstance(action, Send):
                    self.perform(action)
                elif not self._transport.send(*action):
                    further += self._engine.unreachable(action.peer)
            actions = further

    def perform(self, action: Action) -> None:
        """Do what is asked for besides to send; the rest is the compiled loop's."""
        if isinstance(action, Close):
            self._guard.close(action.peer)
