"""Which reducers are in use, by versions that all ranks agree on, and who carries what (sans I/O).

A version of the shard map, an epoch, says between which reducers buffers are cut. It changes only
where all ranks agree on it, so they cut alike. A reducer that is lost in between leaves the cuts as
they are; each chunk that was its own gets an heir, by a rule that gives all ranks the same one as
soon as they know of the same losses. What is still in progress when a reducer is used again does
not go back to it: ranks learn of that at different times. Only when no reducer of an epoch is left,
another stage of it begins, in which any reducer that answers takes all.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.constants import MAX_LANES
from reducer.wire.layout import shards
from reducer.wire.messages import LAST_EPOCH, LAST_STAGE
from worker_client.protocol.flight import LinkShard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reducer.wire.constants import DType
    from worker_client.protocol import _flight
    from worker_client.protocol.link import Link

NEVER = -1
# A rank that waits for the answer of one question may be so many epochs behind one that has it, and
# waits for the next one's: what that one loses is for the epoch after that.
APART = 2
_KEPT_EPOCHS = 256  # between two of them are up to 96 calls


class Stage(NamedTuple):
    """A stage of an epoch, in the order of time.

    Attributes:
        epoch: which.
        number: 0 while any of the reducers is left that buffers are cut between; up to
            `LAST_STAGE` when others, or these anew, have taken their place.
    """

    epoch: int
    number: int = 0

    @property
    def following(self) -> Stage:
        """The next stage in which what is in progress may go on."""
        last = self.number == LAST_STAGE
        return Stage(self.epoch + last, 1 if last else self.number + 1)


class ShardMap:
    """The reducers of a job, as one rank knows them.

    Args:
        reducers: how many there are.
        hosted: those that ranks host; they live and die with their rank, and are never lost alone.
        adopts: whether an epoch goes on in another stage when no reducer of it is left.

    Attributes:
        adopts: that.
        epoch: version in force.
        intact: whether nothing is lost of what buffers are cut between now.
    """

    def __init__(
        self, reducers: int, hosted: Collection[int] = (), *, adopts: bool = False
    ) -> None:
        self.epoch = 0
        self.intact = True
        self._all = tuple(range(reducers))
        self._hosted = frozenset(hosted)
        self.adopts = adopts
        # By epoch: what buffers are cut between, and how many lanes of each take part.
        self._bases: dict[int, Mapping[int, int]] = {0: self._first}
        self._lost = [Stage(NEVER)] * reducers  # the latest in which each was lost
        self._admitted = [0] * reducers  # the latest one that all ranks agreed to use it in

    @property
    def base(self) -> tuple[int, ...]:
        """Reducers between which buffers are cut now."""
        return tuple(self._bases[self.epoch])

    @property
    def lanes(self) -> Mapping[int, int]:
        """How many lanes of these reducers take part, if they have so many."""
        return self._bases[self.epoch]

    def lanes_of(self, reducer: int, epoch: int) -> int:
        """Return how many lanes of a reducer take part in what was begun in an epoch."""
        first = self._first
        return self._bases.get(epoch, first).get(reducer, first[reducer])

    @property
    def _first(self) -> Mapping[int, int]:
        """What every rank can begin with: some may not know what lanes a reducer of a pool has."""
        known = self._all if len(self._all) == 1 else self._hosted
        return {reducer: MAX_LANES if reducer in known else 1 for reducer in self._all}

    @property
    def final(self) -> Stage:
        """The last stage that any rank can be in while this one is in its epoch."""
        return Stage(self.epoch + APART, LAST_STAGE)

    def stage(self, epoch: int | None = None) -> Stage | None:
        """Return the stage of what was begun in an epoch, by default now; None if all are lost."""
        epoch = self.epoch if epoch is None else epoch
        first = Stage(epoch)
        if any(self._lost[reducer] < first for reducer in self._bases.get(epoch, ())):
            return first
        if not self.adopts or epoch not in self._bases:
            return None
        latest = max(first, min(self._lost[r] for r in self._all if r not in self._hosted))
        stage = latest.following
        return stage if stage <= self.final else None

    def used(self, epoch: int | None = None) -> list[int]:
        """Return the reducers that are used, by default now, for what was begun in an epoch."""
        stage = self.stage(epoch)
        if stage is None:
            return []
        some = self._all if stage.number else self._bases[stage.epoch]
        hosted = self._hosted if stage.number else ()
        return [r for r in some if self._lost[r] < stage and r not in hosted]

    def uses(self, reducer: int, epoch: int | None = None) -> bool:
        """Whether a reducer is used, by default now, for what was begun in an epoch."""
        return reducer in self.used(epoch)

    @property
    def adopted(self) -> int | None:
        """The reducer that has taken the place of all of this epoch, if one has."""
        stage = self.stage()
        return None if stage is None or stage.number == 0 else self.used()[0]

    def lose(self, reducer: int, stage: Stage) -> None:
        """Record that a reducer is lost in a stage, and in all before."""
        self._lost[reducer] = max(stage, self._lost[reducer])
        self.intact = self._is_intact()

    def _is_intact(self) -> bool:
        return all(self._lost[reducer] < Stage(self.epoch) for reducer in self.base)

    def knows(self, reducer: int, stage: Stage) -> bool:
        """Whether it is known that a reducer is lost in a stage."""
        return stage <= self._lost[reducer]

    def lost_for(self, reducer: int) -> Stage:
        """Return the latest stage in which a reducer was lost."""
        return self._lost[reducer]

    def is_past(self, reducer: int, stage: Stage) -> bool:
        """Whether ranks have agreed on a reducer since it was lost in a stage."""
        return stage.epoch < self._admitted[reducer]

    def lost(self) -> dict[int, Stage]:
        """Every loss that is not made good, by reducer."""
        return {r: at for r, at in enumerate(self._lost) if at.epoch >= self._admitted[r]}

    def heir(self, reducer: int, number: int, epoch: int) -> int | None:
        """Return who takes over a chunk of a lost reducer, None if nobody is left.

        Args:
            reducer: whose it was.
            number: of the chunk within its shard; neighbours get different heirs.
            epoch: in which the all-reduce was begun.
        """
        base = tuple(self._bases.get(epoch, ()))
        if reducer not in base:
            return None  # nothing is in progress for so long
        stage = self.stage(epoch)
        if stage is None or stage.number:
            return next(iter(self.used(epoch)), None)
        place, others = base.index(reducer), len(base) - 1
        for step in range(others):
            heir = base[(place + 1 + (number + step) % others) % len(base)]
            if self.uses(heir, epoch):
                return heir
        return None

    def agree(self, usable_lanes: Sequence[int]) -> None:
        """Begin the epoch that all ranks have agreed on, with the lanes that every rank can use."""
        lanes = [MAX_LANES if r in self._hosted else usable_lanes[r] for r in self._all]
        agreed = {reducer: count for reducer, count in enumerate(lanes) if count}
        self._begin(self.epoch + 1, agreed or self.lanes)

    def fresh(self) -> int:
        """Return an epoch that is later than any rank's, for which nothing is lost but for ever.

        Others may have got the answer that begins the next one while this rank did not.
        """
        losses = [stage.epoch for stage in self._lost if stage.epoch < LAST_EPOCH]
        return max([self.epoch + 2, *(epoch + 1 for epoch in losses)])

    def renew(self, epoch: int) -> None:
        """Begin anew with all reducers, as ranks have lost touch."""
        self._begin(epoch, self._first)

    def _begin(self, epoch: int, base: Mapping[int, int]) -> None:
        self.epoch = epoch
        self._bases[epoch] = base
        if len(self._bases) > _KEPT_EPOCHS:
            del self._bases[next(iter(self._bases))]
        for reducer in base:
            self._admitted[reducer] = epoch
        self.intact = self._is_intact()


class ShardPlan:
    """Cuts the buffers of a job.

    Args:
        weights: share of each reducer, relative to the others.
        chunk_bytes: the forced size of chunks, 0 for the rule.
        chunk_bytes_of: that rule: takes the size of a buffer and its number of shards. What it
            says changes with the `use` of other reducers alone.
        flight: remembers how buffers were cut.

    Attributes:
        turns: after so many all-reduces the first shard is at the same place again.
    """

    def __init__(
        self,
        weights: Sequence[int],
        chunk_bytes: int,
        chunk_bytes_of: Callable[[int, int], int],
        flight: _flight.CompiledFlight,
    ) -> None:
        self._flight = flight
        self._weights_of_reducers = weights
        self._chunk_bytes = chunk_bytes
        self._chunk_bytes_of = chunk_bytes_of
        self._owners: list[int] = []  # links in the order in which they take shards
        self._weights: list[int] = []  # of the owners
        self.turns = 0

    def use(self, links: Sequence[Link], taking_part: Mapping[int, int]) -> None:
        """Share buffers out over the links of reducers, whose lanes divide their parts.

        Args:
            links: all.
            taking_part: how many lanes of each reducer do; none of those that it lacks.
        """
        # Lanes answer in any order, but every rank must cut buffers alike.
        weights = self._weights_of_reducers
        owners = sorted(
            (
                link
                for link in links
                if link.lane < taking_part.get(link.reducer, 0) and weights[link.reducer]
            ),
            key=lambda link: (link.reducer, link.lane),
        )
        lanes = Counter(link.reducer for link in owners)
        whole = math.lcm(*lanes.values())
        self._owners = [link.index for link in owners]
        self.turns = len(owners)
        self._weights = [weights[link.reducer] * whole // lanes[link.reducer] for link in owners]
        self._flight.forget_cuts(self.turns)

    def share(self, link: Link) -> float:
        """Return what a link's reducer owns, relative to the one that owns most: 0 to 1."""
        return self._weights_of_reducers[link.reducer] / max(self._weights_of_reducers)

    def cut(self, nbytes: int, sequence: int, dtype: DType) -> tuple[list[LinkShard], int]:
        """Cut the buffer of an all-reduce; return its shards and the size of their chunks."""
        cut = shards(nbytes, self._weights, sequence, self._chunk_bytes, dtype.itemsize)
        parts = [LinkShard(self._owners[to], start, end) for to, start, end in cut]
        return parts, self._chunk_bytes_of(nbytes, len(parts))
