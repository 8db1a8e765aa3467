"""What the all-reduces of a job have moved through a reducer, and how long they took (sans I/O).

The time of an all-reduce begins with its first contribution and ends when its latest result is
ready to be sent; a small sum is not timed. The ranks' own work and the way back are not part of it.
An all-reduce is counted when every rank has gone on to a later one. All-reduces that failed are
left out, and so are those by which ranks agree. `traffic.h` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping  # noqa: TC003 (pydantic reads it)
from typing import NamedTuple

OCTAVES = 26  # from 1 us on
BUCKETS = 8 * OCTAVES  # of equal width within an octave, so that a middle is right to a sixteenth


class Traffic(NamedTuple):
    """What the all-reduces of a job have done, in one thread or in all.

    Attributes:
        bytes_in: of contributions.
        bytes_out: of results, to all ranks together.
        all_reduces: how many are over; of all threads, as that one has it that has most.
        us: how long they took together, microseconds; each thread has its part of each.
        buckets: a histogram of the times of these parts. Bucket `8 * k + n` counts those of at
            least `(1 + n / 8) * 2**k` microseconds; empty buckets are left out.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    all_reduces: int = 0
    us: int = 0
    buckets: Mapping[int, int] = {}

    def plus(self, other: Traffic) -> Traffic:
        """Return what two threads have done."""
        return Traffic(
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            max(self.all_reduces, other.all_reduces),
            self.us + other.us,
            Counter(self.buckets) + Counter(other.buckets),
        )

    def since(self, earlier: Traffic) -> Traffic:
        """Return what was done after an earlier look at the same threads."""
        return Traffic(
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
            self.all_reduces - earlier.all_reduces,
            self.us - earlier.us,
            Counter(self.buckets) - Counter(earlier.buckets),
        )

    def quantile_s(self, share: float) -> float:
        """Return the time within which this share of all-reduces is over; 0 if there is none.

        That of the nearest rank, right to a sixteenth from 8 us to 67 s.
        """
        left = share * sum(self.buckets.values())
        for bucket, number in sorted(self.buckets.items()):
            left -= number
            if left <= 0:
                return _middle_s(bucket)
        return 0.0

    def within(self, octave: int) -> int:
        """Return how many took less than ``2**octave`` microseconds."""
        return sum(number for bucket, number in self.buckets.items() if bucket < 8 * octave)


NO_TRAFFIC = Traffic()


def _middle_s(bucket: int) -> float:
    octave, eighth = divmod(bucket, 8)
    return (1 + (eighth + 0.5) / 8) * (1 << octave) / 1e6
