"""Hosts, cards and a switch on a virtual clock: what a message takes from one host to another.

**The model.** Every host has one card, and one port of one switch. Connections take turns at a
card, of two segments each, as Linux has them. A segment is 64 KiB, or the power of two below a
shorter message: so the last bytes of a chunk, behind a header, wait for a turn of their own, as the
end of a message does in TCP's next segment. A segment that has left its card is at the receiver's
port, behind the segments that came before. A port has a buffer: a segment that finds no room is
lost, and its connection sends it again
after the time in which a sender notices, a round trip and what the full buffer takes; meanwhile it
sends nothing. That is less than TCP may take: here it has no slow start and no timeouts. Nor has it
a window of its own, so queues hold what the protocol's windows let through.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

SEGMENT_BYTES = 64 << 10  # the most that TCP hands down at once
TURN_SEGMENTS = 2  # of a connection that Linux lets wait at a card (`tcp_small_queue_check`)


class VirtualClock:
    """Seconds that pass as fast as the events between them are worked off.

    Attributes:
        now: seconds since the start.
        events: how many there were.
        stopped: `run` is to return.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, event: Callable[..., object], *arguments: Any) -> None:
        """Have an event happen at a time; those of one time in the order in which they were put."""
        self.events += 1
        heapq.heappush(self._due, (time, self.events, event, arguments))

    def run(self) -> None:
        """Let time pass until it is `stopped`, or nothing is left to happen."""
        due = self._due
        while due and not self.stopped:
            self.now, _, event, arguments = heapq.heappop(due)
            event(*arguments)


class LinkRate(NamedTuple):
    """What a link carries one way.

    Attributes:
        bytes_per_s: payload.
        burst_bytes: by which it catches up after a rest, as a shaper of the kernel does; a card of
            hardware does not.
    """

    bytes_per_s: float
    burst_bytes: int = 0


class LinkQueue:
    """One way of a link, in the order of arrival: from a card, or from a switch's port to a host.

    Args:
        rate: of it.
        buffer_bytes: what may wait there; 0 for any number.

    Attributes:
        carried, lost: bytes that have left, and that found no room.
        deepest: the most bytes that have waited when others came.
        full_s: what a full buffer takes to leave, seconds.
    """

    __slots__ = ("_buffer", "_burst_s", "_free", "_rate", "carried", "deepest", "full_s", "lost")

    def __init__(self, rate: LinkRate, buffer_bytes: int = 0) -> None:
        self._rate = rate.bytes_per_s
        self._burst_s = rate.burst_bytes / self._rate
        self._buffer = buffer_bytes or math.inf
        self._free = 0.0  # when it has nothing left, seconds
        self.carried = self.lost = self.deepest = 0
        self.full_s = buffer_bytes / self._rate

    def take(self, begun: float, whole: float, nbytes: int) -> float | None:
        """Return when bytes have left that came from `begun` to `whole`; None: they are lost."""
        depth = max(0, round((self._free - whole) * self._rate))
        if depth + nbytes > self._buffer:
            self.lost += nbytes
            return None
        self.deepest = max(self.deepest, depth)
        self.carried += nbytes
        self._free = max(self._free, begun - self._burst_s) + nbytes / self._rate
        return max(self._free, whole)


class Flow:
    """One direction of a connection: messages in order.

    Args:
        card: of the host that sends.
        port: to the one that receives.
        receive: is called with each message when all of it is there.

    Attributes:
        unsent: bytes that have not left.
    """

    __slots__ = ("card", "messages", "port", "receive", "unsent", "waits")

    def __init__(self, card: Card, port: LinkQueue, receive: Callable[..., object]) -> None:
        self.card, self.port, self.receive = card, port, receive
        self.messages: list[list[Any]] = []  # bytes left of each, all, what it says
        self.unsent = 0
        self.waits = False  # for its turn, or for a while after a loss

    def send(self, nbytes: int, *message: Any) -> None:
        """Send a message of so many bytes."""
        self.messages.append([nbytes, nbytes, message])
        self.unsent += nbytes
        if not self.waits:
            self.waits = True
            self.card.enqueue(self)


class LocalFlow:
    """As `Flow`, within a host: no link carries it.

    Args:
        clock: of all.
        receive: is called with each message.
    """

    __slots__ = ("_clock", "_receive", "unsent")

    def __init__(self, clock: VirtualClock, receive: Callable[..., object]) -> None:
        self.unsent = 0
        self._clock, self._receive = clock, receive

    def send(self, nbytes: int, *message: Any) -> None:
        """Send a message of so many bytes."""
        del nbytes
        self._clock.at(self._clock.now, self._receive, *message)


class Card:
    """A host's card, and the connections that have something to send.

    Args:
        clock: of all.
        rate: of the link to the switch.
        delay_s: from there to the receiver's port.
        segment_bytes: the most that is sent at once.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rate: LinkRate,
        delay_s: float,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.link = LinkQueue(rate)
        self._clock = clock
        self._delay_s = delay_s
        self._segment_bytes = segment_bytes
        self._turn: deque[Flow] = deque()  # the first one sends
        self._left = 0  # bytes of its turn; 0 before it
        self._busy = False

    def enqueue(self, flow: Flow) -> None:
        """Give a connection that has something to send its turn, the last one."""
        self._turn.append(flow)
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        self._busy = True
        flow = self._turn[0]
        left, size, _ = flow.messages[0]
        if not self._left:
            self._left = TURN_SEGMENTS * min(self._segment_bytes, 1 << (size.bit_length() - 1))
        nbytes = min(left, self._segment_bytes, self._left)
        now = self._clock.now
        gone = self.link.take(now, now, nbytes) or now  # nothing is lost there
        self._clock.at(gone, self._sent, flow, nbytes, now)

    def _sent(self, flow: Flow, nbytes: int, begun: float) -> None:
        """Pass on to the port what has left, and begin with what follows."""
        clock, delay_s = self._clock, self._delay_s
        arrived = flow.port.take(begun + delay_s, clock.now + delay_s, nbytes)
        self._left -= nbytes
        if arrived is None:
            self._end_turn()
            clock.at(clock.now + 2 * delay_s + flow.port.full_s, self.enqueue, flow)
        else:
            message = flow.messages[0]
            message[0] -= nbytes
            flow.unsent -= nbytes
            if not message[0]:
                del flow.messages[0]
                clock.at(arrived, flow.receive, *message[2])
            if not flow.messages:
                flow.waits = False
                self._end_turn()
            elif not self._left:
                self._end_turn()
                self._turn.append(flow)
        self._busy = False
        if self._turn:
            self._begin()

    def _end_turn(self) -> None:
        self._turn.popleft()
        self._left = 0


class Processor:
    """One core of a host, which does one thing after another.

    Attributes:
        busy_s: for how long it was, seconds.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._free = 0.0

    def do(self, seconds: float, event: Callable[..., object], *arguments: Any) -> None:
        """Have something happen that takes so long, after what was asked for before."""
        if not seconds:
            event(*arguments)
            return
        self.busy_s += seconds
        self._free = max(self._free, self._clock.now) + seconds
        self._clock.at(self._free, event, *arguments)
