"""A virtual clock: what is to happen, in the order of time, and in a fixed order at one time."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Seconds that pass as fast as the simulator can run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._count += 1
        heappush(self._events, (max(time, self.now), self._count, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen some seconds from now."""
        self.at(self.now + seconds, event)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let time pass until `done` or the time is over."""
        while self._events and not done():
            if self._events[0][0] > until:
                self.now = until
                return
            self.now, _, event = heappop(self._events)
            event()
