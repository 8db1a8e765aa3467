"""Which link carries which part of a buffer: every rank must plan alike."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from reducer.wire.layout import shards, turn_of
from worker_client.protocol.flight import LinkShard

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from worker_client.protocol.link import Link

_KEPT = 1024


class Plan:
    """Cuts the buffers of a job.

    Args:
        weights: share of each reducer, relative to the others.
        chunk_bytes: the forced size of chunks, 0 for the rule.
    """

    def __init__(self, weights: Sequence[int], chunk_bytes: int) -> None:
        self._weights_of_reducers = weights
        self._chunk_bytes = chunk_bytes
        self._owners: list[int] = []  # links in the order in which they take shards
        self._weights: list[int] = []  # of the owners
        self._known: dict[tuple[int, int], list[LinkShard]] = {}  # by size and turn: sizes return

    def use(self, links: Sequence[Link], reducers: Collection[int]) -> None:
        """Share buffers out over the links of these reducers, whose lanes divide their parts."""
        # Lanes answer in any order, but every rank must cut buffers alike.
        weights = self._weights_of_reducers
        owners = sorted(
            (link for link in links if link.reducer in reducers and weights[link.reducer]),
            key=lambda link: (link.reducer, link.lane),
        )
        lanes = Counter(link.reducer for link in owners)
        whole = math.lcm(*lanes.values())
        self._owners = [link.index for link in owners]
        self._weights = [weights[link.reducer] * whole // lanes[link.reducer] for link in owners]
        self._known.clear()

    def share(self, link: Link) -> float:
        """Return what a link's reducer owns, relative to the one that owns most: 0 to 1."""
        return self._weights_of_reducers[link.reducer] / max(self._weights_of_reducers)

    def cut(self, nbytes: int, sequence: int) -> list[LinkShard]:
        """Cut the buffer of an all-reduce."""
        key = nbytes, turn_of(sequence) % len(self._owners)
        known = self._known.get(key)
        if known is None:
            cut = shards(nbytes, self._weights, sequence, self._chunk_bytes)
            known = [LinkShard(self._owners[to], start, end) for to, start, end in cut]
            if len(self._known) == _KEPT:
                self._known.clear()
            self._known[key] = known
        return known
