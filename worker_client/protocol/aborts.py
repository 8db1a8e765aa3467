"""How reducers learn of all-reduces that have failed at this rank: at once, or later (sans I/O)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reducer.wire.constants import MAX_ROUNDS_AHEAD, MessageType
from reducer.wire.messages import encode_error
from worker_client.protocol.actions import Send
from worker_client.protocol.link import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.errors import ReductionError
    from reducer.wire.header import Header
    from worker_client.protocol.flight import Flight
    from worker_client.protocol.link import Link
    from worker_client.protocol.shard_map import ShardMap


MOST = 256  # entries of what has failed here; then the oldest become one


class Aborts:
    """What reducers are told, all of them: any may take the place of others later.

    Args:
        links: the session's.
        flight: knows the watermark.
        shard_map: knows the epoch.
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
        self._failed: deque[Failed] = deque()  # what some rank may not have finished

    def tell(self, sequence: int, error: ReductionError, told_by: Link | None) -> list[Send]:
        """Tell all reducers but the one that has told us that an all-reduce cannot be finished."""
        return self._note(Failed(sequence, sequence, error), told_by)

    def tell_finished(self, error: ReductionError) -> list[Send]:
        """Tell that nobody can have results from here that other ranks may still lack."""
        reached, watermark = self._flight.reached, self._flight.watermark
        if reached == watermark:
            return []
        self._failed.clear()  # it is all among this
        return self._note(Failed(reached, watermark - 1, error))

    def _note(self, failed: Failed, told_by: Link | None = None) -> list[Send]:
        while self._failed and self._failed[0].last < self._flight.reached:
            self._failed.popleft()
        if len(self._failed) == MOST:
            oldest, next_one = self._failed.popleft(), self._failed.popleft()
            last = max(oldest.last, next_one.last)
            self._failed.appendleft(Failed(min(oldest.first, next_one.first), last, oldest.error))
        self._failed.append(failed)
        sends = []
        for link in self._links:
            if link.member and link is not told_by:
                link.untold.append(failed)
                sends += self.pay(link)
        return sends

    def welcomed(self, link: Link) -> None:
        """Take note that a reducer is to be told everything: it may be another process now."""
        link.untold = list(self._failed)

    def pay(self, link: Link) -> list[Send]:
        """Tell a reducer what has failed here and it was not told yet, as far as that may be."""
        sends = []
        limit = self._flight.watermark + MAX_ROUNDS_AHEAD  # nothing may be said of what is beyond
        while link.untold and link.member and link.untold[0].last < limit:
            sends.append(self._abort(link, link.untold.pop(0)))
        return sends

    def abort(self, link: Link, sequence: int, error: ReductionError) -> Send:
        """Give up an all-reduce."""
        return self._abort(link, Failed(sequence, sequence, error))

    def _abort(self, link: Link, failed: Failed) -> Send:
        header = self._header(MessageType.ABORT)._replace(
            sequence=failed.first, nbytes=failed.last - failed.first, epoch=self._map.epoch
        )
        return Send(link.index, header.pack(), encode_error(failed.error))
