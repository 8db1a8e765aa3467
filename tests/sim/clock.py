"""A virtual clock: what is to happen, in the order of time, and in a fixed order at one time."""

from heapq import heappop, heappush


class Clock:
    """Seconds that pass as fast as the simulator can run."""

    def __init__(self):
        self.now = 0.0
        self._events = []
        self._count = 0

    def at(self, time, event):
        self._count += 1
        heappush(self._events, (max(time, self.now), self._count, event))

    def after(self, seconds, event):
        self.at(self.now + seconds, event)

    def run(self, until, done):
        """Let time pass until `done` or the time is over."""
        while self._events and not done():
            if self._events[0][0] > until:
                self.now = until
                return
            self.now, _, event = heappop(self._events)
            event()
