"""Flow control: how many bytes may be in flight on each link (sans I/O).

Too few leave the link idle between a contribution and its result. Too many push each other out of
the caches, and make chunks of several ranks that belong together arrive far apart.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reducer.wire.constants import FAR_S
from reducer.wire.layout import LARGEST_CHUNK, cost

if TYPE_CHECKING:
    from worker_client.protocol import _flight

MOST_BYTES = 16 << 20  # over all links; a reducer sets aside as much for every worker
MOST_FAR_BYTES = 256 << 20  # over all links in a far network, as far as reducers grant it
ASK_S = 1.0  # between two requests for a larger window; twice as long after one in vain, up to
MOST_ASK_S = 64.0
BUSY_CHUNKS = 2  # per link: one is on its way while another is summed
BUSY_BYTES = 512 << 10  # at least, so that ranks whose turn differs do not wait for each other
LOOK_S = 0.2  # while a large one is in progress; and what a rate that is shown spans at least
SAMPLES = 16  # the best rate, and the shortest round trip, of so many measurements counts
FAR_ROUND_TRIPS = 5  # that a chunk takes there, if packets are lost: each holds up what comes later


def window_limit(window_bytes: int, chunk_bytes: int, reducers: int) -> int:
    """Return what a worker asks a reducer for: the most that it will ever have in flight there.

    Args:
        window_bytes: forced for all reducers together, 0 for the rule.
        chunk_bytes: forced size of chunks, 0 for the rule.
        reducers: how many share the window.

    Returns:
        Bytes; never below two chunks.
    """
    chunk = cost(chunk_bytes or LARGEST_CHUNK)
    return max((window_bytes or MOST_BYTES) // reducers, 2 * chunk)


class FlowControl:
    """Chooses the windows of a worker's links from what it measures.

    A link's window is the product of its rate and its shortest round trip, and what it takes
    besides to keep both ends busy. Both are those of large all-reduces: a small one takes less time
    than a chunk needs to leave, and says nothing of the way that many chunks share. A window that
    is too small for the distance so grows with every look until the rate grows no more. In a far
    network it is the product with several round trips: TCP sends lost packets again, and hands out
    what came after them only then, at the reducer, at the ranks, and for each rank whose
    contribution is missing. A reducer that owns less than others gets less, so that all are done at
    the same time: contributions to it must not fill the network card's queue, while those to a
    larger owner wait at its end of the network, where all ranks meet. In a far network that may be
    more than a reducer has set aside when the worker joined: it is asked for the difference when
    that is known.

    Args:
        flight: whose windows are set.
        forced: use all that the reducers allow.

    Attributes:
        chunk_bytes: size of chunks.
        carries: what links to other machines have carried together, bytes per second: the best of
            spans of `LOOK_S` or more; 0 if that is not known. A single look may be so short that it
            finds what had come to the kernel before.
    """

    def __init__(self, flight: _flight.CompiledFlight, chunk_bytes: int, forced: bool) -> None:
        self.chunk_bytes = chunk_bytes
        self._flight = flight
        self._forced = forced
        self._limits: dict[int, int] = {}
        self._shares: dict[int, float] = {}
        self._far_s: dict[int, float] = {}  # round trips of the network, where they are long
        self._wanted: dict[int, int] = {}  # windows of links whose reducers may be asked for more
        self._asks: dict[
            int, tuple[float, float]
        ] = {}  # not again before; and the pause after that
        self._rates: dict[int, deque[float]] = {}
        self._trips_s: dict[int, deque[float]] = {}
        self._local: set[int] = set()  # links that leave no machine
        self._span = 0, 0.0  # bytes that have come from other machines, and in how many seconds
        self.carries = 0.0

    def admit(
        self,
        link: int,
        limit: int,
        share: float,
        round_trip_s: float = 0.0,
        *,
        can_grow: bool = False,
        local: bool = False,
    ) -> None:
        """Begin with a link that the reducer has opened.

        Args:
            link: its index.
            limit: the window that the reducer allows, bytes.
            share: what the reducer owns, relative to the one that owns most, 0 to 1.
            round_trip_s: of the network alone, seconds; 0 if that is not known.
            can_grow: whether the reducer may allow more later.
            local: whether the reducer is in this process.
        """
        self.dismiss(link)
        if local:
            self._local.add(link)
        if round_trip_s >= FAR_S:
            self._far_s[link] = round_trip_s
            if can_grow and not self._forced:
                self._wanted[link] = 0
        self._limits[link] = limit
        self._shares[link] = share
        self._rates[link] = deque(maxlen=SAMPLES)
        self._trips_s[link] = deque(maxlen=SAMPLES)
        self._flight.measure_anew(link)
        self._set_window(link, 0.0)

    def dismiss(self, link: int) -> None:
        """End with a link that is lost, until it is admitted anew."""
        self._limits.pop(link, None)
        self._rates.pop(link, None)
        self._far_s.pop(link, None)
        self._wanted.pop(link, None)
        self._asks.pop(link, None)

    @property
    def rate(self) -> float:
        """What the links carry together, bytes per second; 0 if that is not known yet."""
        return sum(map(self._rate_of, self._rates))

    def _rate_of(self, link: int) -> float:
        return max(self._rates.get(link, ()), default=0.0)

    def ended(self, now: float) -> None:
        """Record that an all-reduce of `MEASURED_BYTES` or more has ended well, at `now`."""
        if now - self._flight.measured_since >= self._farthest_s:
            self._look(now)

    def tick(self, now: float) -> None:
        """Measure links by large all-reduces that take long, or that C has ended; call it often."""
        if ended := self._flight.large_ended:
            self._flight.large_ended = 0.0
            self.ended(ended)
        if self._flight.large and now - self._flight.measured_since >= max(
            LOOK_S, self._farthest_s
        ):
            self._look(now)

    def asks(self, now: float) -> list[tuple[int, int]]:
        """Return links whose reducers are to be asked for a larger window, and how many bytes."""
        due = []
        for link, wanted in self._wanted.items():
            after, pause = self._asks.get(link, (now, ASK_S))
            if wanted > self._limits[link] and now >= after:
                self._asks[link] = now + pause, min(2 * pause, MOST_ASK_S)
                due.append((link, wanted))
        return due

    def raise_limit(self, link: int, nbytes: int) -> None:
        """Record the larger window that a reducer has granted, bytes; the next look uses it."""
        if link in self._wanted and nbytes > self._limits[link]:
            self._limits[link] = nbytes
            after, _ = self._asks.get(link, (0.0, ASK_S))
            self._asks[link] = after, ASK_S

    @property
    def _farthest_s(self) -> float:
        """The least between two looks, seconds: far results come in bursts, a round trip apart."""
        return max(self._far_s.values(), default=0.0)

    def _look(self, now: float) -> None:
        elapsed = now - self._flight.measured_since
        if elapsed <= 0:
            return
        self._flight.measured_since = now
        nbytes, spanned_s = self._span
        for link in self._limits:
            stats = self._flight.stats(link)
            nbytes += 0 if link in self._local else stats.measured
            self._flight.measure_anew(link)
            if stats.measured:  # a link that waits says nothing about what it can carry
                self._rates[link].append(stats.measured / elapsed)
                self._trips_s[link].append(stats.min_rtt_s)
            carried = self._rate_of(link)
            carried *= FAR_ROUND_TRIPS if link in self._far_s else 1
            if link in self._wanted:  # no more than that: a result also waits for other ranks
                self._wanted[link] = self._window(link, carried * self._far_s[link])
            self._set_window(link, carried * min(self._trips_s[link], default=0.0))
        self._span = nbytes, spanned_s + elapsed
        if spanned_s + elapsed >= LOOK_S:
            self.carries = max(self.carries, nbytes / (spanned_s + elapsed))
            self._span = 0, 0.0

    def _set_window(self, link: int, distance: float) -> None:
        limit = self._limits[link]
        window = limit if self._forced else min(limit, self._window(link, distance))
        self._flight.set_window(link, window)

    def _window(self, link: int, distance: float) -> int:
        """Return the window for a distance, bytes: with what keeps both ends of the link busy."""
        busy = max(BUSY_BYTES, BUSY_CHUNKS * cost(self.chunk_bytes)) * self._shares[link] ** 2
        return min(int(busy + distance), MOST_FAR_BYTES // len(self._limits))
