"""Which ranks are lost, and which ones an all-reduce waits for, as reducers say (sans I/O)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reducer.errors import RankLostError
from worker_client.protocol.operation import STRAGGLER_S

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from worker_client.protocol.link import Link
    from worker_client.protocol.operation import Operation, Pending
    from worker_client.protocol.shard_map import ShardMap

log = logging.getLogger(__name__)


class RollCall:
    """What reducers have said of ranks.

    Args:
        links: the session's.
        shard_map: knows which reducers are in use.
        active: the all-reduces in progress.
        elastic: whether the ranks that are left go on elsewhere when one is lost.
    """

    def __init__(
        self, links: Sequence[Link], shard_map: ShardMap, active: Pending, *, elastic: bool
    ) -> None:
        self._links = links
        self._map = shard_map
        self._active = active
        self._elastic = elastic
        self._outdated: set[int] = set()  # links whose next PING may be from before the agreement
        self._lost: dict[int, tuple[int, ...]] = {}  # by link: ranks, if its reducer said so last

    @property
    def lost(self) -> set[int]:
        """Ranks that a reducer in use has lost, or that have left."""
        # One that cannot reach a rank, but is not in use, says nothing of that rank's life.
        said = tuple(self._lost.items())
        used = [ranks for link, ranks in said if self._map.uses(self._links[link].reducer)]
        return {rank for ranks in used for rank in ranks}

    def hear(self, link: Link, lost: tuple[int, ...], now: float) -> None:
        """Take note of the ranks that are lost at a reducer, by its latest PING."""
        if link.index in self._outdated:
            self._outdated.discard(link.index)
            return
        news = set(lost) - set(self._lost.pop(link.index, ()))
        if lost:
            self._lost[link.index] = lost
        if news:
            self._active.hurry(now)

    def agreed(self) -> None:
        """Forget who was lost: every rank has just said which reducers it can use."""
        self._lost.clear()
        self._outdated = {link.index for link in self._links}

    def begin(self, now: float) -> None:
        """See to it that it is soon asked whom an all-reduce waits for, if ranks are lost."""
        if self._lost:
            self._active.hurry(now)

    def answer(
        self, operation: Operation, link: Link, missing: Collection[int], now: float
    ) -> RankLostError | None:
        """Say whom an all-reduce waits for; return why it waits in vain, if it does."""
        # One that is missing may have gone on elsewhere without another one, which is lost.
        if lost := sorted(self.lost if self._elastic else self.lost.intersection(missing)):
            # This reducer cannot know: it was restarted, and that rank has never been there.
            why = f"rank {lost[0]}, which reducer {link.address} waits for, has left or was lost"
            return RankLostError(why, rank=lost[0])
        operation.missing = tuple(missing)
        waited = now - operation.begun
        if waited >= STRAGGLER_S and not operation.quiet:
            log.warning(
                "%s: reducer %s waits for rank %s, %.0f s so far",
                operation,
                link.address,
                ", ".join(map(str, missing)),
                waited,
            )
        return None
