"""How long the ranks of a job wait for one of them, and why (sans I/O).

A chunk whose sum lacks one contribution waits for that rank alone. Had the rank been as early as
the one before it, all would have had their results so much sooner. Chunks of one all-reduce that
wait for it, and those of several that do so at once, make one wait: who is 30 ms late is so for all
of them, and has cost the others 30 ms. So a wait costs as much as its longest chunk has waited.

If the rank falls behind in the middle of a buffer, its contributions take longer than those of the
others: its link is slow, or it lacks processor time to send. How far the others would be, who stop
when their windows are full, nobody can tell: of such waits the cost is a lower bound. A rank that
is behind from the buffer's beginning was busy with something else. `lateness.h` counts them.
"""

from __future__ import annotations

import math
import operator
from enum import IntEnum
from heapq import nsmallest
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.messages import Straggler

if TYPE_CHECKING:
    from reducer.engine import _slots

BUCKETS = 64  # of a quarter of an octave, so that a bucket's middle is right to a tenth
OCTAVES = 14
MIDDLES_S = tuple(0.001 * 2 ** ((bucket - 0.5) / 4) for bucket in range(BUCKETS))  # geometric
SPAN_S = 5.0  # at least; the latest two are looked at together
LONGEST_SPAN_S = 300.0  # until there are enough waits
LEAST_WAITS = 8  # that say something about a rank
LEAST_SHARE = 0.02  # of the time, which the others lose by it
CHANCES = 3  # waits, the longest, that do not count: a pause is no habit
MOST_CHANCE = 1e-5  # that it was no habit; jobs are looked at again and again
IDLE_FACTOR = 5  # times as long as from one wait to the next: then there are none any more


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
        buckets: how many, by how long they were: below 1 ms, by quarters of an octave from there
            on, and above 46 s.
    """

    us: int = 0
    buckets: tuple[int, ...] = (0,) * BUCKETS

    @property
    def number(self) -> int:
        """How many there were."""
        return sum(self.buckets)

    @property
    def octaves(self) -> tuple[int, ...]:
        """How many lasted for less than 1, 2, 4 ... 4096 ms, and for longer."""
        found = [0] * OCTAVES
        for bucket, number in enumerate(self.buckets):
            found[min((bucket + 3) // 4, OCTAVES - 1)] += number
        return tuple(found)

    def plus(self, other: Waits) -> Waits:
        """Return these and others."""
        buckets = zip(self.buckets, other.buckets, strict=True)
        return Waits(self.us + other.us, tuple(map(sum, buckets)))

    def median_s(self, least: int) -> float:
        """Return how long the median one from a bucket on was; right to a tenth, from 1 ms on."""
        seen, half = 0, (self.above(least) + 1) / 2
        for bucket, number in enumerate(self.buckets[least:], least):
            seen += number
            if number and seen >= half:
                return MIDDLES_S[bucket]
        return 0.0

    @property
    def habit_s(self) -> float:
        """How long all but the longest `CHANCES` were together, seconds."""
        left, lost_s = max(0, self.number - CHANCES), 0.0
        for bucket, number in enumerate(self.buckets):
            counted = min(number, left)
            left -= counted
            lost_s += counted * MIDDLES_S[bucket]
        return lost_s

    @property
    def long(self) -> int:
        """The bucket from which on waits are long: half as long as those of half of the time."""
        spent_s = list(map(operator.mul, self.buckets, MIDDLES_S))
        left_s = sum(spent_s) / 2
        for bucket in reversed(range(BUCKETS)):
            left_s -= spent_s[bucket]
            if left_s <= 0:
                return max(0, bucket - 4)
        return 0

    def above(self, bucket: int) -> int:
        """Return how many were as long as that bucket says, or longer."""
        return sum(self.buckets[bucket:])


class RankWaits(NamedTuple):
    """How long the others have waited for a rank since the job began, by cause."""

    rank: int
    late: Waits
    slow: Waits


def costliest(lateness: _slots.Lateness, most: int) -> tuple[RankWaits, ...]:
    """Return the ranks for which the others have waited most since the job began."""
    lost = lateness.us(lately=False)
    ranks = nsmallest(most, range(len(lost)), key=lambda rank: (-lost[rank], rank))
    return tuple(
        RankWaits(rank, *(lateness.waits(rank, Span.EVER, cause) for cause in Cause))
        for rank in ranks
        if lost[rank]
    )


def long_waits(lateness: _slots.Lateness) -> int:
    """Return how many waits there were since the latest turn, but for short ones."""
    waits = max((lateness.all(Span.NOW, cause) for cause in Cause), key=lambda one: one.us)
    return waits.above(waits.long)


def least_waits(world_size: int) -> int:
    """Return of how many long waits all must be for one rank, or chance may explain it."""
    fewest = 1 + math.ceil(-math.log(MOST_CHANCE) / math.log(max(2, world_size)))
    return max(LEAST_WAITS, fewest)


def straggler(
    lateness: _slots.Lateness, world_size: int, seconds: float, named: int | None = None
) -> Straggler | None:
    """Return the rank that the others wait for again and again, if there is one.

    By chance they wait as long for each of n ranks. For this one it is that and half of all the
    rest, and `LEAST_SHARE` of the time. And it is no accident: of the long waits, of which most of
    the time is made, more are for it than chance explains. What was shown of a rank need not be
    shown again: it remains the straggler for as long as the others wait for it as much.

    Args:
        lateness: what is known.
        world_size: number of ranks.
        seconds: how long the latest two spans are.
        named: the rank that was the straggler until now, if one was.
    """
    lost = lateness.us(lately=True)
    if not lost or seconds <= 0:
        return None
    rank = max(range(world_size), key=lost.__getitem__)
    causes = [_lately(lateness, rank, cause) for cause in Cause]
    cause = max(Cause, key=lambda one: causes[one].us)
    known = causes[cause]
    least_us = (1 + 1 / world_size) / 2 * sum(lost)
    if lost[rank] < least_us or known.habit_s < LEAST_SHARE * seconds:
        return None
    everyones = _lately(lateness, None, cause)
    # Which waits are long must not depend on whose they are: chance would seem to bring less.
    long = everyones.long
    if rank != named:
        mine, of = known.above(long), everyones.above(long)
        if mine < LEAST_WAITS or world_size * chance(mine, of, 1 / world_size) > MOST_CHANCE:
            return None
    share = min(1.0, lost[rank] / 1e6 / seconds)
    return Straggler(rank, "late" if cause is Cause.LATE else "slow", share, known.median_s(long))


def _lately(lateness: _slots.Lateness, rank: int | None, cause: Cause) -> Waits:
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
        self._told: tuple[int, str] | None = None  # rank and cause of the latest one
        self._turns: tuple[float, ...] = ()  # when the two latest spans began
        self._apart_s = 0.0  # a wait and the next one, in the span before

    def look(self, lateness: _slots.Lateness, world_size: int, now: float) -> Straggler | None:
        """Look, if it is time; return the straggler if its rank or cause is not the latest one's.

        Args:
            lateness: of the job's ranks.
            world_size: number of ranks.
            now: seconds of a monotonic clock.
        """
        self._turns = self._turns or (now, now)
        span_s = now - self._turns[1]
        if span_s < SPAN_S:
            return None
        named = None if self.straggler is None else self.straggler.rank
        if named is not None and span_s > IDLE_FACTOR * self._apart_s:
            lost_us = sum(lateness.waits(named, Span.NOW, cause).us for cause in Cause)
            if lost_us < 1e6 * LEAST_SHARE * span_s:
                self.straggler = named = None
        waits = long_waits(lateness)
        if waits < least_waits(world_size) and span_s < LONGEST_SPAN_S:
            return None  # steps may be long
        found = straggler(lateness, world_size, now - self._turns[0], named)
        self.straggler = found
        self._turns = self._turns[1], now
        self._apart_s = span_s / max(1, waits)
        lateness.turn()
        if found is None or (found.rank, found.cause) == self._told:
            return None
        self._told = found.rank, found.cause
        return found
