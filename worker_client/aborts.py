"""How reducers learn of all-reduces that have failed at this rank: at once, or later (sans I/O)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.wire.constants import MAX_ROUNDS_AHEAD, MessageType
from reducer.wire.messages import encode_error
from worker_client.actions import Send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.errors import ReductionError
    from reducer.wire.header import Header
    from worker_client.flight import Flight
    from worker_client.link import Link
    from worker_client.shard_map import ShardMap


class Aborts:
    """What reducers are told, and what they are owed.

    Args:
        links: the session's.
        flight: knows the watermark.
        shard_map: knows where any rank may wait for something.
        header: makes the header of a message.
    """

    def __init__(
        self,
        links: Sequence[Link],
        flight: Flight,
        shard_map: ShardMap,
        header: Callable[[MessageType], Header],
    ) -> None:
        self._links = links
        self._flight = flight
        self._map = shard_map
        self._header = header

    def tell(self, sequence: int, error: ReductionError, told_by: Link | None) -> list[Send]:
        """Tell all reducers but the one that has told us that an all-reduce cannot be finished."""
        sends = []
        for link in self._links:
            if not self._map.uses(link.reducer):
                continue
            if not link.member or sequence >= self._limit:
                link.owe(sequence, error)
            elif link is not told_by:
                sends.append(self.abort(link, sequence, error))
        return sends

    def owe_finished(self, error: ReductionError) -> None:
        """Take note that nobody can have results from here that other ranks may still lack."""
        reached, watermark = self._flight.reached, self._flight.watermark
        for link in self._links if reached < watermark else ():
            link.owe(reached, error)
            link.owe(watermark - 1, error)

    def pay(self, link: Link) -> list[Send]:
        """Tell a reducer what has failed here while it could not be told."""
        if link.owed is None or not link.member or link.owed.last >= self._limit:
            return []
        (first, last, error), link.owed = link.owed, None
        return [self.abort(link, first, error, last - first)]

    def abort(self, link: Link, sequence: int, error: ReductionError, more: int = 0) -> Send:
        """Give up an all-reduce, and so many after it."""
        header = self._header(MessageType.ABORT)._replace(
            sequence=sequence, nbytes=more, epoch=self._map.epoch
        )
        return Send(link.index, header.pack(), encode_error(error))

    @property
    def _limit(self) -> int:
        """Sequence number from which on nothing may be said yet."""
        return self._flight.watermark + MAX_ROUNDS_AHEAD
