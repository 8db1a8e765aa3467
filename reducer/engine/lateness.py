"""How long the ranks of a job wait for one of them, and why (sans I/O).

A chunk whose sum lacks one contribution waits for that rank alone. Had the rank been as early as
the one before it, all would have had their results so much sooner. Chunks of one all-reduce that
wait for it, and those of several that do so at once, make one wait: who is 30 ms late is so for all
of them, and has cost the others 30 ms. So a wait costs as much as its longest chunk has waited.

If the rank falls behind in the middle of a buffer, its contributions take longer than those of the
others: its link is slow, or it lacks processor time to send. How far the others would be, who stop
when their windows are full, nobody can tell: of such waits the cost is a lower bound. A rank that
is behind from the buffer's beginning was busy with something else. `lateness.h` has the same for
the compiled slots.
"""

from __future__ import annotations

import math
from enum import IntEnum
from heapq import nsmallest
from typing import NamedTuple

from reducer.wire.messages import Straggler

BUCKETS = 14
SPAN_S = 5.0  # at least; the latest two are looked at together
LONGEST_SPAN_S = 60.0  # until there are enough waits
LEAST_WAITS = 8  # that say something about a rank
LEAST_SHARE = 0.02  # of the time, which the others lose by it
CHANCES = 3  # waits, the longest, that do not count: a pause is no habit
MOST_CHANCE = 1e-4  # that it was no habit; jobs are looked at again and again


class Cause(IntEnum):
    """Why the others wait for a rank."""

    LATE = 0
    SLOW = 1


class Span(IntEnum):
    """When: since the latest turn, between the latest two, or since the job began."""

    NOW = 0
    BEFORE = 1
    EVER = 2


LATELY = (Span.NOW, Span.BEFORE)


class Waits(NamedTuple):
    """Waits for a rank, or for all of them, for one cause.

    Attributes:
        us: microseconds.
        buckets: how many, by how long they were: below 1, 2, 4 ... 4096 ms, and above.
    """

    us: int = 0
    buckets: tuple[int, ...] = (0,) * BUCKETS

    @property
    def number(self) -> int:
        """How many there were."""
        return sum(self.buckets)

    def plus(self, other: Waits) -> Waits:
        """Return these and others."""
        buckets = zip(self.buckets, other.buckets, strict=True)
        return Waits(self.us + other.us, tuple(map(sum, buckets)))

    @property
    def median_s(self) -> float:
        """How long the median one was, seconds."""
        seen, half = 0, (self.number + 1) / 2
        for bucket, number in enumerate(self.buckets):
            seen += number
            if number and seen >= half:
                return middle_s(bucket)
        return 0.0

    @property
    def habit_s(self) -> float:
        """How long all but the longest `CHANCES` were together, seconds."""
        left, lost_s = max(0, self.number - CHANCES), 0.0
        for bucket, number in enumerate(self.buckets):
            counted = min(number, left)
            left -= counted
            lost_s += counted * middle_s(bucket)
        return lost_s

    @property
    def typical(self) -> int:
        """The bucket from which on half of the time was spent."""
        left_s = sum(number * middle_s(at) for at, number in enumerate(self.buckets)) / 2
        for bucket in reversed(range(BUCKETS)):
            left_s -= self.buckets[bucket] * middle_s(bucket)
            if left_s <= 0:
                return bucket
        return 0

    def above(self, bucket: int) -> int:
        """Return how many were as long as that bucket says, or longer."""
        return sum(self.buckets[bucket:])


def middle_s(bucket: int) -> float:
    """Return the geometric middle of a bucket, seconds."""
    return float(0.001 * 2 ** (bucket - 0.5))


class RankWaits(NamedTuple):
    """How long the others have waited for a rank since the job began, by cause."""

    rank: int
    late: Waits
    slow: Waits


class _Rank:
    """What is known of a rank; `lateness.h` explains the names."""

    def __init__(self) -> None:
        self.heard_in = -1
        self.until_us = 0
        self.cost_us = [0, 0]
        self.waits = [[Waits() for _ in Cause] for _ in Span]


class Lateness:
    """What is known of a job's ranks.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[int, _Rank] = {}  # that have been heard
        self._all = [[Waits() for _ in Cause] for _ in Span]

    def hear(self, rank: int, sequence: int, now_us: int, alone_us: int) -> None:
        """Count a contribution, and the wait for it if there was one.

        Args:
            rank: whose.
            sequence: of the all-reduce.
            now_us: when it has come, in microseconds of a monotonic clock.
            alone_us: since when its chunk has waited for this rank alone; 0 if it still waits for
                others.
        """
        its = self._ranks.get(rank)
        if its is None:
            its = self._ranks[rank] = _Rank()
        if alone_us != 0:
            goes_on = sequence == its.heard_in
            if alone_us > its.until_us and not goes_on:
                self._close(its)
            cause = Cause.SLOW if goes_on else Cause.LATE
            its.cost_us[cause] += max(0, now_us - alone_us - sum(its.cost_us))
            its.until_us = now_us
        its.heard_in = sequence

    def _close(self, its: _Rank) -> None:
        late, slow = its.cost_us
        us = late + slow
        if us == 0:
            return
        cause = Cause.LATE if late >= slow else Cause.SLOW
        bucket = min((us // 1000).bit_length(), BUCKETS - 1)
        wait = Waits(us, tuple(int(at == bucket) for at in range(BUCKETS)))
        for spans in (its.waits, self._all):
            for span in (Span.NOW, Span.EVER):
                spans[span][cause] = spans[span][cause].plus(wait)
        its.cost_us = [0, 0]

    def turn(self) -> None:
        """Begin a new span."""
        for spans in (self._all, *(one.waits for one in self._ranks.values())):
            spans[Span.BEFORE], spans[Span.NOW] = spans[Span.NOW], [Waits() for _ in Cause]

    def all(self, span: Span, cause: Cause) -> Waits:
        """Return the waits for all ranks."""
        return self._all[span][cause]

    def waits(self, rank: int, span: Span, cause: Cause) -> Waits:
        """Return the waits for one rank."""
        its = self._ranks.get(rank)
        return Waits() if its is None else its.waits[span][cause]

    def us(self, lately: bool) -> list[int]:
        """Return how long the others have waited for each rank, in microseconds.

        Args:
            lately: in the latest two spans; otherwise since the job began.
        """
        spans = LATELY if lately else (Span.EVER,)
        lost = [0] * self._world_size if self._ranks else []
        for rank, its in self._ranks.items():
            lost[rank] = sum(its.waits[at][why].us for at in spans for why in Cause)
        return lost


def costliest(lateness: Lateness, most: int) -> tuple[RankWaits, ...]:
    """Return the ranks for which the others have waited most since the job began."""
    lost = lateness.us(lately=False)
    ranks = nsmallest(most, range(len(lost)), key=lambda rank: (-lost[rank], rank))
    return tuple(
        RankWaits(rank, *(lateness.waits(rank, Span.EVER, cause) for cause in Cause))
        for rank in ranks
        if lost[rank]
    )


def number_of_waits(lateness: Lateness, *spans: Span) -> int:
    """Return how many waits there were in some spans, for whatever rank."""
    return sum(lateness.all(span, cause).number for span in spans for cause in Cause)


def straggler(lateness: Lateness, world_size: int, seconds: float) -> Straggler | None:
    """Return the rank that the others wait for again and again, if there is one.

    By chance they wait as long for each of n ranks. For this one it is that and half of all the
    rest, and `LEAST_SHARE` of the time. And it is no accident: of the waits as long as its typical
    ones, more are for it than chance explains.

    Args:
        lateness: what is known.
        world_size: number of ranks.
        seconds: how long the latest two spans are.
    """
    lost = lateness.us(lately=True)
    if not lost or number_of_waits(lateness, *LATELY) < LEAST_WAITS or seconds <= 0:
        return None
    rank = max(range(world_size), key=lost.__getitem__)
    causes = [_lately(lateness, rank, cause) for cause in Cause]
    cause = max(Cause, key=lambda one: causes[one].us)
    its = causes[cause]
    least_us = (1 + 1 / world_size) / 2 * sum(lost)
    if lost[rank] < least_us or its.habit_s < LEAST_SHARE * seconds:
        return None
    mine = its.above(its.typical)
    everyones = _lately(lateness, None, cause).above(its.typical)
    if world_size * chance(mine, everyones, 1 / world_size) > MOST_CHANCE:
        return None
    share = min(1.0, lost[rank] / 1e6 / seconds)
    return Straggler(rank, "late" if cause is Cause.LATE else "slow", share, its.median_s)


def _lately(lateness: Lateness, rank: int | None, cause: Cause) -> Waits:
    now, before = (
        lateness.all(span, cause) if rank is None else lateness.waits(rank, span, cause)
        for span in LATELY
    )
    return now.plus(before)


def chance(least: int, of: int, share: float) -> float:
    """Return the probability that so many waits or more are for a rank that has `share` of them.

    The upper tail of the binomial distribution; 1 if that is no more than its share.
    """
    if least <= of * share:
        return 1.0
    tail = 0.0
    for number in range(least, of + 1):
        ways = math.lgamma(of + 1) - math.lgamma(number + 1) - math.lgamma(of - number + 1)
        term = math.exp(ways + number * math.log(share) + (of - number) * math.log1p(-share))
        tail += term
        if term <= 1e-9 * tail:  # they become smaller and smaller
            break
    return tail


class Watch:
    """Looks from time to time for the rank of a job that the others wait for.

    Attributes:
        straggler: that rank, if there is one.
    """

    def __init__(self) -> None:
        self.straggler: Straggler | None = None
        self._named: tuple[int, str] | None = None  # rank and cause of the latest one
        self._turns: tuple[float, ...] = ()  # when the two latest spans began

    def look(self, lateness: Lateness, world_size: int, now: float) -> Straggler | None:
        """Look, if it is time; return the straggler if its rank or cause is not the latest one's.

        Args:
            lateness: of the job's ranks.
            world_size: number of ranks.
            now: seconds of a monotonic clock.
        """
        self._turns = self._turns or (now, now)
        waited_s = now - self._turns[1]
        if waited_s < SPAN_S:
            return None
        if number_of_waits(lateness, Span.NOW) == 0:
            self.straggler = None
        if number_of_waits(lateness, *LATELY) < LEAST_WAITS and waited_s < LONGEST_SPAN_S:
            return None  # steps may be long
        self.straggler = found = straggler(lateness, world_size, now - self._turns[0])
        self._turns = self._turns[1], now
        lateness.turn()
        if found is None or (found.rank, found.cause) == self._named:
            return None
        self._named = found.rank, found.cause
        return found
