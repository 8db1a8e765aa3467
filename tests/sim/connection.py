"""One connection between a worker and a reducer: ordered, lossless, until it breaks.

Messages lie in the caller's memory until they have left the worker's process, as they are sent from
there: what the caller writes before that changes what the reducer gets. Of what lies there when the
worker closes the connection some may be with the kernel, and nothing else is read any more.
"""

from typing import Any, NamedTuple

from reducer.wire.constants import MessageType
from reducer.wire.header import Header

HEARTBEATS_S = (1.0, 1.3)  # within this time either end notices that the other is out of reach
STUCK_S = 0.01  # how often a message that cannot leave tries again
_DATA = {MessageType.CONTRIBUTION, MessageType.RESULT, MessageType.RETAINED}


class Message(NamedTuple):
    """A header and a payload, which may be a view of somebody's memory."""

    header: bytes
    payload: Any

    @property
    def data(self):
        """Whether networks and proxies may repeat or swap it: nothing depends on its place."""
        return Header.unpack(self.header).type in _DATA


class Leaving:
    """A message that has yet to leave its process.

    Attributes:
        message: it.
    """

    def __init__(self, message):
        self.message = message


class Connection:
    """A connection of one rank's link.

    Args:
        clock, rng: the simulation's.
        ends: the worker's end and the reducer's: who hears `arrived(connection, message)` and
            `broken(connection)`.
        link: the worker's number of the link.
        place: the reducer and its lane.
        faults: how likely a message is repeated or overtaken.
        name: for the reducer: its transport's name of the peer.
    """

    def __init__(  # noqa: PLR0917 (all of them differ)
        self, clock, rng, ends, link, place, name, faults
    ):
        self.link = link
        self.reducer, self.lane = place
        self.name = name
        self.open = [True, True]  # whether each end believes in it
        self.cut = False  # nothing arrives any more
        self.leaving = []  # whose payloads still lie in the worker's memory
        self._clock = clock
        self._rng = rng
        self._ends = ends
        self._faults = faults
        self._leaves = [0.0, 0.0]  # when the latest message of each direction leaves its process
        self._last = [0.0, 0.0]  # and when it arrives
        self._kept_back = [False, False]  # something has not left before the end was closed

    def send(self, end, message):
        """Send from the worker's end (0) or the reducer's (1)."""
        if not self.open[end]:
            return
        delay = self._rng.uniform(0.0, self._faults.process_s) if end == 0 else 0.0
        self._leaves[end] = max(self._leaves[end], self._clock.now + delay)
        leaving = Leaving(message)
        if end == 0:
            self.leaving.append(leaving)
        self._clock.at(self._leaves[end], lambda: self._leave(end, leaving))

    def _leave(self, end, leaving):
        if end == 0 and self.open[0] and (self.cut or self._ends[1].stopped):
            # Nobody takes it: it stays in its sender's memory until the connection is closed.
            self._leaves[0] = max(self._leaves[0], self._clock.now + STUCK_S)
            self._clock.after(STUCK_S, lambda: self._leave(0, leaving))
            return
        message = leaving.message
        if end == 0:
            self.leaving = [one for one in self.leaving if one is not leaving]
        if not self.open[end]:  # some of it had left before, but nothing after what had not
            self._kept_back[end] |= self._rng.random() < 0.5
            if self._kept_back[end]:
                return
        message = Message(message.header, bytes(message.payload or b""))
        travels = self._rng.uniform(0.0001, self._faults.latency_s)
        arrival = max(self._last[end], self._clock.now + travels)
        if message.data and self._rng.random() < self._faults.swap:
            arrival += self._faults.latency_s  # what follows overtakes it
        else:
            self._last[end] = arrival
        self._clock.at(arrival, lambda: self._arrive(end, message))
        if message.data and self._rng.random() < self._faults.repeat:
            again = arrival + self._rng.uniform(0.0, 2 * self._faults.latency_s)
            self._clock.at(again, lambda: self._arrive(end, message))

    def _arrive(self, end, message):
        if self.open[1 - end] and not self.cut:
            self._ends[1 - end].arrived(self, message)

    def close(self, end):
        """Close one end; the other one notices, sooner or later."""
        if self.open[end]:
            self._shut(end)
            self._notice(1 - end)

    def reset(self):
        """Both ends notice at once or soon, and what was on its way is lost."""
        self.cut = True
        self._notice(0)
        self._notice(1)

    def partition(self):
        """Nothing arrives any more; both ends notice by their heartbeats."""
        self.cut = True
        for end in range(2):
            self._clock.after(self._rng.uniform(*HEARTBEATS_S), lambda end=end: self._end(end))

    def _notice(self, end):
        soon = self._rng.choice((0.0, 0.001, 0.02, 0.2))
        self._clock.after(soon * self._rng.random(), lambda: self._end(end))

    def _end(self, end):
        if self.open[end]:
            self._shut(end)
            self._ends[end].broken(self)

    def detach(self, buffer):
        """Read a buffer no more: what lies there of it is copied."""
        for leaving in self.leaving:
            header, payload = leaving.message
            if getattr(payload, "obj", None) is buffer:
                leaving.message = Message(header, bytes(payload))

    def _shut(self, end):
        self.open[end] = False
        if end == 1:
            return
        for leaving in self.leaving:
            header, payload = leaving.message
            leaving.message = Message(header, None if payload is None else bytes(payload))
        self.leaving = []
