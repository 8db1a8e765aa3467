"""One connection between a worker and a reducer: ordered, lossless, until it breaks.

Messages lie in the caller's memory until they have left the worker's process, as they are sent from
there: what the caller writes before that changes what the reducer gets. Of what lies there when the
worker closes the connection some may be with the kernel, and nothing else is read any more.

In a far network a connection may outlive its socket. What the compiled transports do for that with
bytes is done here with messages, each of which counts as one byte: an end keeps what it has sent
until it has arrived, and sends it again over the socket with which the connection goes on. What is
said about that, and by whom, is the business of the sessions and engines.
"""

from collections import deque
from functools import partial
from types import SimpleNamespace
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

    Attributes:
        number: which connection of its link it is: 0 is the first one.
        carries: the reducer takes contributions that come over it.
        kept: whether each end, should the socket break, waits for another one.
        suspended: whether each end does so.
        resumes, fresh: the connection that is to go on over this one, and the other way round.
        attempts, until: how often the worker has asked for that, and for how long it does, seconds.
        socket: over how many others the connection has gone on.
        arrived: messages that have, by their sender.
        last_arrival: when the latest of them that has left arrives, seconds.
    """

    def __init__(  # noqa: PLR0917 (all of them differ)
        self, clock, rng, ends, link, place, name, faults
    ):
        self.link = link
        self.reducer, self.lane = place
        self.name = name
        self.open = [True, True]  # whether each end believes in it
        self.cut = False  # nothing arrives any more
        self.leaving = []  # messages whose payloads still lie in the worker's memory
        self._clock = clock
        self._rng = rng
        self._ends = ends
        self._faults = faults
        self._leaves = [0.0, 0.0]  # when the latest message of each direction leaves its process
        self.last_arrival = [0.0, 0.0]
        self._kept_back = [False, False]  # something has not left before the end was closed
        self.number = 0
        self.carries = True
        self.kept = [False, False]
        self.suspended = [False, False]
        self.resumes = self.fresh = None
        self.attempts = 0
        self.until = 0.0
        self.socket = 0
        self.arrived = [0, 0]
        self._under_way = deque(), deque()  # by sender: what has left, and has not arrived

    def send(self, end, message):
        if not self.open[end]:
            return
        delay = self._rng.uniform(0.0, self._faults.process_s) if end == 0 else 0.0
        self._leaves[end] = max(self._leaves[end], self._clock.now + delay)
        leaving = SimpleNamespace(message=message)
        if end == 0:
            self.leaving.append(leaving)
        self._clock.at(self._leaves[end], lambda: self.leave(end, leaving))

    def leave(self, end, leaving):
        stuck = self.cut or self.suspended[0] or self._ends[1].stopped
        if end == 0 and self.open[0] and stuck:
            # Nobody takes it: it stays in its sender's memory until the connection is closed.
            self._leaves[0] = max(self._leaves[0], self._clock.now + STUCK_S)
            self._clock.after(STUCK_S, lambda: self.leave(0, leaving))
            return
        message = leaving.message
        if end == 0:
            self.leaving = [one for one in self.leaving if one is not leaving]
        if not self.open[end]:  # some of it had left before, but nothing after what had not
            self._kept_back[end] |= self._rng.random() < 0.5
            if self._kept_back[end]:
                return
        message = Message(message.header, bytes(message.payload or b""))
        if self._faults.far_s:
            self._under_way[end].append(message)
        self._travel(end, message)

    def _travel(self, end, message):
        socket, faults = self.socket, self._faults
        travels = faults.far_s / 2 + self._rng.uniform(0.0001, faults.latency_s)
        arrival = max(self.last_arrival[end], self._clock.now + travels)
        # Of a far link's messages the streams overtake each other, but not those of one of them.
        loose = message.data and not faults.far_s
        if loose and self._rng.random() < faults.swap:
            arrival += faults.latency_s  # what follows overtakes it
        else:
            self.last_arrival[end] = arrival
        self._clock.at(arrival, lambda: self._arrive(end, message, socket))
        if loose and self._rng.random() < faults.repeat:
            again = arrival + self._rng.uniform(0.0, 2 * faults.latency_s)
            self._clock.at(again, lambda: self._arrive(end, message, socket))

    def _arrive(self, end, message, socket):
        if self.open[1 - end] and not self.cut and socket == self.socket:
            if self._faults.far_s:
                self._under_way[end].popleft()
            self.arrived[end] += 1
            self._ends[1 - end].arrived(self, message)

    def go_on(self, fresh, arrived):
        """Have the reducer's end go on over another connection's socket, and say so there first.

        Args:
            fresh: the other connection, which the worker then closes.
            arrived: messages that the worker has got, as it has said.
        """
        answer = Header(MessageType.RESUME, offset=self.arrived[0])
        fresh.leave(1, SimpleNamespace(message=Message(answer.pack(), None)))
        self.socket += 1
        self.cut = fresh.cut
        self.last_arrival[1] = max(self.last_arrival[1], fresh.last_arrival[1])
        self.send_again(1, arrived)

    def send_again(self, end, arrived):
        """Go on at one end with what has not arrived.

        Args:
            end: of the sender.
            arrived: messages that the other end has got, as that has said.
        """
        said = f"connection {self.name!r} goes on at {arrived}, not at {self.arrived[end]}"
        assert arrived == self.arrived[end], said
        self.suspended[end] = False
        if self.cut or not self.open[1 - end]:  # that socket has broken already
            self._notice(end)
            return
        for message in self._under_way[end]:
            self._travel(end, message)

    def close(self, end):
        """Close one end; the other one notices, sooner or later."""
        if self.open[end]:
            self._shut(end)
            self._notice(1 - end)

    def reset(self):
        """Both ends notice at once or soon, and what was on its way is lost, or sent again."""
        self.cut = True
        self._notice(0)
        self._notice(1)
        if self.fresh is not None:  # whose socket the reducer may use for this one already
            self.fresh.reset()

    def partition(self):
        """Nothing arrives any more; both ends notice by their heartbeats."""
        self.cut = True
        for end in range(2):
            self._clock.after(
                self._rng.uniform(*HEARTBEATS_S), partial(self._end, end, self.socket, silent=True)
            )
        if self.fresh is not None:
            self.fresh.partition()

    def give_up(self, end):
        """Wait at one end no longer for another socket."""
        if self.open[end]:
            self._shut(end)
            self._ends[end].broken(self)

    def _notice(self, end):
        soon = self._rng.choice((0.0, 0.001, 0.02, 0.2))
        self._clock.after(soon * self._rng.random(), partial(self._end, end, self.socket))

    def _end(self, end, socket, *, silent=False):
        if socket != self.socket:
            return  # of an earlier socket
        if silent or not self.kept[end]:
            self.give_up(end)
        elif self.open[end] and not self.suspended[end]:
            self.suspended[end] = True
            self._ends[end].suspended(self)

    def detach(self, buffer=None):
        """Read a buffer, or any, no more: what lies there is copied."""
        for leaving in self.leaving:
            header, payload = leaving.message
            if payload is not None and (buffer is None or getattr(payload, "obj", 0) is buffer):
                leaving.message = Message(header, bytes(payload))

    def _shut(self, end):
        self.open[end] = False
        if end == 0:
            self.detach()
            self.leaving = []
