"""A clock for processes that may be stopped, or do not get to run on a busy machine.

A module of its own, as reducers and workers judge each other's silence by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_S = 0.25  # between two looks at the clock of a thread that runs: more than a step takes


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
        self._latest = self._now = read()

    def now(self) -> float:
        """Return the seconds of a monotonic clock; to be asked several times in `MOST_S`."""
        latest, self._latest = self._latest, self._read()
        self._now += min(self._latest - latest, MOST_S)
        return self._now
