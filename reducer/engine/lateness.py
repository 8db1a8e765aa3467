"""How long ranks let the others wait, and why (sans I/O).

Of each all-reduce a reducer knows when every rank's contributions began to come, and how long they
took. Had the rank that came last been as early as the one before it, all would have had the result
so much sooner: that much is its own fault. So it is with the one whose contributions took longest.
Who comes late was busy with something else; who takes long has a slow link, or too little of its
processor. Buffers that are sent one behind the other queue on a slow link: a rank that kept sending
until it came is slow, not late. `lateness.h` has the same for the compiled slots.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.messages import Straggler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

BUCKETS = 14
SPAN_S = 5.0  # the latest two are looked at together
LEAST_ROUNDS = 8  # that say something about a rank
LEAST_SHARE = 0.05  # of the time that has passed, as what the others wait for one
CHANCES = 3  # rounds, the costliest, that do not count: a pause is no habit


class Cause(IntEnum):
    """Why the others wait for a rank."""

    LATE = 0
    SLOW = 1


class Span(IntEnum):
    """When: since the latest turn, between the latest two, or since the job began."""

    NOW = 0
    BEFORE = 1
    EVER = 2


class Waits(NamedTuple):
    """What the others have lost by one rank, for one cause.

    Attributes:
        us: microseconds.
        buckets: rounds, by what was lost in each: below 1, 2, 4 ... 4096 ms, and above.
    """

    us: int = 0
    buckets: tuple[int, ...] = (0,) * BUCKETS

    @property
    def rounds(self) -> int:
        """Number of rounds in which it was the last."""
        return sum(self.buckets)

    def plus(self, *others: Waits) -> Waits:
        """Return the sums of these and others."""
        waits = (self, *others)
        buckets = zip(*(one.buckets for one in waits), strict=True)
        return Waits(sum(one.us for one in waits), tuple(map(sum, buckets)))

    @property
    def median_s(self) -> float:
        """What was lost in the median round, seconds."""
        seen, half = 0, (self.rounds + 1) / 2
        for bucket, rounds in enumerate(self.buckets):
            seen += rounds
            if rounds and seen >= half:
                return middle_s(bucket)
        return 0.0

    @property
    def habit_s(self) -> float:
        """What was lost in all rounds but the costliest `CHANCES`, seconds."""
        left, lost_s = max(0, self.rounds - CHANCES), 0.0
        for bucket, rounds in enumerate(self.buckets):
            counted = min(rounds, left)
            left -= counted
            lost_s += counted * middle_s(bucket)
        return lost_s


def middle_s(bucket: int) -> float:
    """Return the geometric middle of a bucket, seconds."""
    return float(0.001 * 2 ** (bucket - 0.5))


class RankWaits(NamedTuple):
    """A rank, and what the others have lost by it: by cause, lately and since the job began."""

    rank: int
    lately: tuple[Waits, Waits]
    ever: tuple[Waits, Waits]


class Lateness:
    """What is known of a job's ranks; begins with the first round that is over.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds = [0] * len(Span)
        self._waits: list[list[list[Waits]]] = []  # by rank, span, cause

    def take(self, arrivals: Sequence[tuple[int, int, int]]) -> None:
        """Take what is known of a round that is over; one that lacks a rank does not count.

        Args:
            arrivals: when each rank's first and last contribution came, in microseconds after the
                first one of all, plus one; 0 of one that never has. And the rank's last one before
                these, of any round; 0 if that was before the first one of all.
        """
        if self._world_size < 2 or any(first == 0 for first, *_ in arrivals):
            return
        if not self._waits:
            self._waits = [
                [[Waits() for _ in Cause] for _ in Span] for _ in range(self._world_size)
            ]
        for span in (Span.NOW, Span.EVER):
            self._rounds[span] += 1
        firsts = [first for first, *_ in arrivals]
        next_most, most = sorted(firsts)[-2:]
        rank = firsts.index(most)
        kept_sending = arrivals[rank][2] - next_most > (most - next_most) // 2
        self._count(rank, Cause.SLOW if kept_sending else Cause.LATE, most - next_most)
        took = [last - first for first, last, _ in arrivals]
        next_most, most = sorted(took)[-2:]
        self._count(took.index(most), Cause.SLOW, most - next_most)

    def _count(self, rank: int, cause: Cause, us: int) -> None:
        if us == 0:
            return
        bucket = min((us // 1000).bit_length(), BUCKETS - 1)
        counted = Waits(us, tuple(int(at == bucket) for at in range(BUCKETS)))
        spans = self._waits[rank]
        for span in (Span.NOW, Span.EVER):
            spans[span][cause] = spans[span][cause].plus(counted)

    def turn(self) -> None:
        """Begin a new span."""
        self._rounds[Span.BEFORE], self._rounds[Span.NOW] = self._rounds[Span.NOW], 0
        for spans in self._waits:
            spans[Span.BEFORE], spans[Span.NOW] = spans[Span.NOW], [Waits() for _ in Cause]

    def rounds(self, span: Span) -> int:
        """Return how many rounds counted in a span."""
        return self._rounds[span]

    def costliest(self, most: int) -> list[int]:
        """Return the ranks by which most was lost, lately and then ever, at most so many."""
        return costliest(
            ((sum(waits.us for waits in spans[span]) for span in Span) for spans in self._waits),
            most,
        )

    def waits(self, rank: int, span: Span, cause: Cause) -> Waits:
        """Return what was lost by a rank."""
        return self._waits[rank][span][cause] if self._waits else Waits()


def costliest(lost: Iterable[Iterable[int]], most: int) -> list[int]:
    """Return the ranks that have the largest losses, of each span, in the order of `Span`."""
    keys = []
    for rank, spans in enumerate(lost):
        now, before, ever = spans
        if ever:
            keys.append((-(now + before), -ever, rank))
    return [rank for *_, rank in sorted(keys)[:most]]


def ranked(lateness: Lateness, most: int) -> Iterator[RankWaits]:
    """Return what is known of the ranks by which most was lost."""
    for rank in lateness.costliest(most):
        waits = [[lateness.waits(rank, span, cause) for cause in Cause] for span in Span]
        now, before, ever = waits
        late, slow = (one.plus(other) for one, other in zip(now, before, strict=True))
        yield RankWaits(rank, (late, slow), (ever[0], ever[1]))


def straggler(
    ranks: Iterable[RankWaits], rounds: int, world_size: int, seconds: float
) -> Straggler | None:
    """Return the rank that the others wait for again and again, if there is one.

    By chance each of n ranks costs the others as much. By this one they lose that and half of all
    the rest, and `LEAST_SHARE` of their time.

    Args:
        ranks: what is known of some.
        rounds: that have counted lately.
        world_size: number of ranks.
        seconds: how long that is.
    """
    if rounds < LEAST_ROUNDS:
        return None
    known = [
        (waits.habit_s, one.rank, cause, waits)
        for one in ranks
        for cause, waits in zip(Cause, one.lately, strict=True)
    ]
    if not known:
        return None
    lost_s, rank, cause, waits = max(known, key=lambda one: one[:3])
    least = (1 + 1 / world_size) / 2 * sum(one[0] for one in known)
    if lost_s < max(least, LEAST_SHARE * seconds):
        return None
    share = min(1.0, waits.rounds / rounds)
    return Straggler(rank, "late" if cause is Cause.LATE else "slow", share, waits.median_s)
