"""Which reducers are in use: versions on which all ranks agree, and who was lost since (sans I/O).

A version of the shard map, an epoch, says between which reducers buffers are cut. It changes only
where all ranks agree on it, so they cut alike. A reducer that is lost in between leaves the cuts as
they are; each chunk that was its own gets an heir, by a rule that gives all ranks the same one as
soon as they know of the same losses. What is still in progress when a reducer is used again never
goes back to it: ranks learn of that at different times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.wire.messages import LAST_EPOCH

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

NEVER = -1
_KEPT = 256  # epochs; between two of them are up to 96 calls


class ShardMap:
    """The reducers of a job, as one rank knows them.

    Args:
        reducers: how many there are.
        hosted: those that ranks host; they live and die with their rank, and are never lost alone.

    Attributes:
        epoch: version in force.
        intact: whether nothing is lost of what buffers are cut between now.
    """

    def __init__(self, reducers: int, hosted: Collection[int] = ()) -> None:
        self.epoch = 0
        self.intact = True
        self._all = tuple(range(reducers))
        self._hosted = frozenset(hosted)
        self._bases = {0: self._all}  # by epoch: what buffers are cut between
        self._lost = [NEVER] * reducers  # the latest epoch in which each was lost
        self._admitted = [0] * reducers  # the latest one that all ranks agreed to use it in

    @property
    def base(self) -> tuple[int, ...]:
        """Reducers between which buffers are cut now."""
        return self._bases[self.epoch]

    def uses(self, reducer: int, epoch: int | None = None) -> bool:
        """Whether a reducer is used, by default now, for what was begun in an epoch."""
        epoch = self.epoch if epoch is None else epoch
        return reducer in self._bases.get(epoch, ()) and self._lost[reducer] < epoch

    def lose(self, reducer: int, epoch: int) -> None:
        """Take note that a reducer is lost in an epoch, and in all before."""
        self._lost[reducer] = max(epoch, self._lost[reducer])
        self.intact = all(map(self.uses, self.base))

    def knows(self, reducer: int, epoch: int) -> bool:
        """Whether it is known that a reducer is lost in an epoch."""
        return epoch <= self._lost[reducer]

    def is_past(self, reducer: int, epoch: int) -> bool:
        """Whether a reducer has been in use again since it was lost in an epoch."""
        return epoch < self._admitted[reducer]

    def lost(self) -> list[tuple[int, int]]:
        """Every loss that is not made good, as reducer and epoch."""
        return [(r, e) for r, e in enumerate(self._lost) if e >= self._admitted[r]]

    def heir(self, reducer: int, number: int, epoch: int) -> int | None:
        """Return who takes over a chunk of a lost reducer, None if nobody is left.

        Args:
            reducer: whose it was.
            number: of the chunk within its shard; neighbours get different heirs.
            epoch: in which the all-reduce was begun.
        """
        base = self._bases.get(epoch, ())
        if reducer not in base:
            return None  # nothing is in progress for so long
        place, others = base.index(reducer), len(base) - 1
        for step in range(others):
            heir = base[(place + 1 + (number + step) % others) % len(base)]
            if self.uses(heir, epoch):
                return heir
        return None

    def agree(self, usable: Sequence[bool]) -> None:
        """Begin the epoch that all ranks have agreed on, with what every rank can use."""
        agreed = tuple(r for r in self._all if usable[r] or r in self._hosted)
        self._begin(self.epoch + 1, agreed or self.base)

    def fresh(self) -> int:
        """Return an epoch that is later than any rank's, for which nothing is lost but for ever.

        Others may have got the answer that begins the next one while this rank did not.
        """
        losses = [epoch for epoch in self._lost if epoch < LAST_EPOCH]
        return max([self.epoch + 2, *(epoch + 1 for epoch in losses)])

    def renew(self, epoch: int) -> None:
        """Begin anew with all reducers, as ranks have lost touch."""
        self._begin(epoch, self._all)

    def _begin(self, epoch: int, base: tuple[int, ...]) -> None:
        self.epoch = epoch
        self._bases[epoch] = base
        if len(self._bases) > _KEPT:
            del self._bases[next(iter(self._bases))]
        for reducer in base:
            self._admitted[reducer] = epoch
        self.intact = all(map(self.uses, base))
