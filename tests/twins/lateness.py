"""How long ranks are waited for, in Python: the oracle of `reducer/engine/lateness.h`."""

from __future__ import annotations

from reducer.engine.lateness import BUCKETS, LATELY, Cause, Span, Waits

EDGES_US = (1000, 1189, 1414, 1682)  # where the first four end; the next four, at twice that


def bucket_of(us: int) -> int:
    """Return the bucket of a wait."""
    bucket = 0
    while bucket < BUCKETS - 1 and us >= EDGES_US[bucket % 4] << bucket // 4:
        bucket += 1
    return bucket


class _Counts:
    """Waits that are being counted."""

    def __init__(self) -> None:
        self.us = 0
        self.buckets = [0] * BUCKETS

    def add(self, us: int) -> None:
        self.us += us
        self.buckets[bucket_of(us)] += 1

    def told(self) -> Waits:
        return Waits(self.us, tuple(self.buckets))


class _Rank:
    """What is known of a rank; `lateness.h` explains the names."""

    def __init__(self) -> None:
        self.latest_sequence = -1
        self.until_us = 0
        self.cost_us = [0, 0]
        self.waits = [[_Counts() for _ in Cause] for _ in Span]


class Lateness:
    """What is known of a job's ranks.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[int, _Rank] = {}  # that have been heard
        self._all = [[_Counts() for _ in Cause] for _ in Span]

    def record(self, rank: int, sequence: int, now_us: int, alone_us: int) -> None:
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = _Rank()
        if alone_us != 0:
            goes_on = sequence == known.latest_sequence
            if alone_us > known.until_us and not goes_on:
                self._close(known)
            cause = Cause.SLOW if goes_on else Cause.LATE
            known.cost_us[cause] += max(0, now_us - alone_us - sum(known.cost_us))
            known.until_us = now_us
        known.latest_sequence = sequence

    def _close(self, known: _Rank) -> None:
        late, slow = known.cost_us
        us = late + slow
        if us == 0:
            return
        cause = Cause.LATE if late >= slow else Cause.SLOW
        for spans in (known.waits, self._all):
            for span in (Span.NOW, Span.EVER):
                spans[span][cause].add(us)
        known.cost_us = [0, 0]

    def turn(self) -> None:
        for spans in (self._all, *(one.waits for one in self._ranks.values())):
            spans[Span.BEFORE], spans[Span.NOW] = spans[Span.NOW], [_Counts() for _ in Cause]

    def all(self, span: Span, cause: Cause) -> Waits:
        return self._all[span][cause].told()

    def waits(self, rank: int, span: Span, cause: Cause) -> Waits:
        known = self._ranks.get(rank)
        return Waits() if known is None else known.waits[span][cause].told()

    def us(self, lately: bool) -> list[int]:
        spans = LATELY if lately else (Span.EVER,)
        lost = [0] * self._world_size if self._ranks else []
        for rank, known in self._ranks.items():
            lost[rank] = sum(known.waits[at][why].us for at in spans for why in Cause)
        return lost
