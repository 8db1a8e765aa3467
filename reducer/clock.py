"""A clock for processes that may be stopped, or do not get to run on a busy machine.

And what reducers and workers judge each other's silence by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.wire.constants import LONGEST_PEER_TIMEOUT_MS

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_S = 0.25  # between two looks at the clock of a thread that runs: more than a step takes
RECENT_S = 1.0  # after a pause: until then what it has caused is noticed
HEARTBEATS_PER_S = 1024  # bytes, generously
JUDGED_S = 0.08  # of a message that has begun: in less, one heartbeat would be too much
# TCP sends what was lost again after 0.2 s and a round trip at the least, and after twice as long
# when that is lost as well. A patience is for near networks, where a second is five such times: at
# a distance it is five round trips longer.
SPARE_ROUND_TRIPS = 5


def is_lost(idle_s: float, peer_timeout_s: float, round_trip_s: float) -> bool:
    """Whether a peer has been silent for too long.

    Args:
        idle_s: for how long, seconds.
        peer_timeout_s: how long it may be in a near network.
        round_trip_s: the shortest of its connection; 0 if that is not known.
    """
    # What a peer has to do with its round trip must not keep its place for ever.
    longest_s = max(peer_timeout_s, LONGEST_PEER_TIMEOUT_MS / 1000)
    return idle_s > min(peer_timeout_s + SPARE_ROUND_TRIPS * round_trip_s, longest_s)


def no_heartbeat(idle_s: float) -> str:
    """Say for how long a peer was silent, and what to do if it had only been stopped."""
    return (
        f"no heartbeat for {idle_s:.1f} s (if it was only stopped, "
        "set REDUCTION_PATIENCE to more than that)"
    )


class ServingTime:
    """A clock that stands still while its process does not run.

    A process that was not scheduled, or whose machine was paused, has heard nobody meanwhile, and
    its peers may not have run either. By this clock a peer is late only if it had the time to speak
    while this process could hear it.

    Args:
        read: a monotonic clock, seconds.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._latest = self._now = self._resumed = read()
        self._paused_s = 0.0

    def now(self) -> float:
        """Return the seconds of a monotonic clock; to be asked several times in `MOST_S`."""
        latest, self._latest = self._latest, self._read()
        passed = self._latest - latest
        if passed > MOST_S:
            self._paused_s, self._resumed = passed, self._latest
        self._now += min(passed, MOST_S)
        return self._now

    def paused_s(self) -> float:
        """Return the seconds for which the clock stood still within the last second, else 0."""
        self.now()
        return self._paused_s if self._latest - self._resumed < RECENT_S else 0.0


class IdleTime:
    """For how long nothing has come from a peer, over a connection of our own.

    Args:
        now: when it was heard, by a `ServingTime`.
    """

    __slots__ = ("_heard", "_looked", "_read")

    def __init__(self, now: float) -> None:
        self._heard = self._looked = now
        self._read = 0

    def listen(self, read: int, now: float, *, partial: bool) -> float:
        """Return how many seconds it has lasted.

        Args:
            read: bytes that have come over the connection since it was made.
            now: by the same clock.
            partial: whether a message has begun; heartbeats alone do not bring it to its end.
        """
        if partial and now - self._looked < JUDGED_S:
            return now - self._heard
        least = HEARTBEATS_PER_S * (now - self._looked) if partial else 0
        if read - self._read > least:
            self._heard = now
        self._read, self._looked = read, now
        return now - self._heard
