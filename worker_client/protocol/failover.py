"""How a worker goes on without a reducer: close, tell, and move its chunks (sans I/O).

The rules are those of `reducer/wire/README.md`, section 6. A chunk is known by its all-reduce and
its offset, and its bits do not depend on who sums it. So ranks may move a chunk at different times,
and need not agree on anything but where it goes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reducer.wire.constants import MessageType
from reducer.wire.messages import ALL_REDUCERS, LAST_EPOCH, Loss, encode
from reducer.wire.states import LinkState
from worker_client.protocol.actions import Reset, Send
from worker_client.protocol.shard_map import NEVER, ShardMap, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.wire.header import Header
    from worker_client.protocol.flight import Carried, Flight
    from worker_client.protocol.link import Link
    from worker_client.protocol.spec import JobSpec

log = logging.getLogger(__name__)


class Failover:
    """The losses of one worker's reducers.

    Args:
        spec: who we are and where the reducers are.
        links: the session's.
        flight: what they carry.
        header: makes the header of a message.

    Attributes:
        map: which reducers are in use.
        losses: how often one that was in use was lost.
        moved: chunks that were sent again to another reducer.
        claimed: chunks whose result is here, of which another reducer was told.
        supplied: results that others needed from here.
        closed: links whose connection is given up, and whose chunks are yet to be moved.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: Sequence[Link],
        flight: Flight,
        header: Callable[[MessageType], Header],
    ) -> None:
        self._fallback = spec.fallback
        self._reducers = len(spec.reducers)
        self._hosts = spec.hosts
        alone = self._reducers == 1 and not self._hosts
        waits = alone and spec.wait_s > 0  # for another process in its place
        adopts = (self.replaceable or waits) and not self._fallback
        self.map = ShardMap(self._reducers, spec.hosts, adopts=adopts)
        self.losses = self.moved = self.claimed = self.supplied = 0
        self.closed: list[Link] = []
        self._links = links
        self._flight = flight
        self._header = header
        self._processes: dict[int, str] = {}  # which of each reducer was lost last
        self._renewed = 0  # the epoch in which everything began anew, if it did
        self._renewed_after = NEVER  # the latest all-reduce whose failure made a rank begin anew

    def keeps(self, reducer: int) -> bool:
        """Whether results of a reducer are kept: it may be lost, and there is another way then."""
        if reducer in self._hosts:
            return False
        return self._fallback or self.map.adopts or self._reducers > 1

    @property
    def replaceable(self) -> bool:
        """Whether any reducer could replace another one."""
        return self._reducers > 1 and len(self._hosts) < self._reducers

    def others(self, reducer: int) -> bool:
        """Whether there is another reducer to go on with."""
        return any(
            link.member and link.reducer != reducer and self.map.uses(link.reducer)
            for link in self._links
        )

    def lose(self, reducer: int, stage: Stage, present: Stage, process: str) -> list[Reset | Send]:
        """Take a reducer out of use, and tell the other ranks; nothing if that was done before.

        Args:
            reducer: its index.
            stage: for which it is lost, and for all before.
            present: for which it is out of use here from now on, if it matters.
            process: which was lost, as it called itself; "" if that is not known.
        """
        if self.map.knows(reducer, stage):
            return []
        used = self.map.uses(reducer)
        self.map.lose(reducer, stage)
        if self.map.is_past(reducer, stage) and not self._matters(reducer, stage.epoch):
            return []
        links = [link for link in self._links if link.reducer == reducer]
        # What took its place since, as another process, is there still.
        stays = process and all(link.member and link.incarnation != process for link in links)
        if not stays or self.map.adopted is None:
            self.map.lose(reducer, present)
        self._processes[reducer] = process
        # Another rank may have lost it while the ranks agreed, and say so for the next epoch.
        self.losses += used
        actions: list[Reset | Send] = [] if stays else [self.leave(link) for link in links]
        said = self._said(self._loss(reducer, self.map.lost()[reducer]))
        return actions + [Send(link.index, *said) for link in self._links if link.member]

    def leave(self, link: Link) -> Reset:
        """Give up a connection; what it carries is moved when it is closed."""
        link.spend(chunk.sequence for chunk in self._flight.carried(link.index))
        return self.close(link)

    def close(self, link: Link) -> Reset:
        """Have the connection of a link closed that nothing in progress needs."""
        link.disconnect()
        self._flight.shut(link.index)
        self.closed.append(link)
        return Reset(link.index)

    def rehome(self, link: Link, sequence: int | None = None) -> tuple[list[Send], list[int]]:
        """Move what a link carried to the heirs of its reducer.

        Args:
            link: whose connection is closed, or whose reducer is out of use.
            sequence: one all-reduce that was not begun there; None for all.

        Returns:
            Claims on results that are here, and the all-reduces that nobody is left for.
        """
        claims: list[Send] = []
        stuck: list[int] = []
        for chunk in self._flight.carried(link.index, sequence):
            reducer = self._links[chunk.home].reducer
            heir = self.map.heir(reducer, chunk.number, chunk.epoch)
            if heir is None:
                stuck += [] if chunk.done else [chunk.sequence]
                continue
            lanes = [other.index for other in self._links if other.reducer == heir]
            to = lanes[chunk.number % len(lanes)]
            self._flight.move(chunk.sequence, chunk.offset, to)
            if not chunk.done:
                self.moved += 1
            elif self._links[to].member:
                claims += self._claim(chunk, to)
        return claims, list(dict.fromkeys(stuck))

    def claim(self, link: Link) -> list[Send]:
        """Claim the results that were moved to a link before its reducer could be told."""
        carried = self._flight.carried(link.index)
        return [send for chunk in carried if chunk.done for send in self._claim(chunk, link.index)]

    def _claim(self, chunk: Carried, to: int) -> list[Send]:
        """Tell a reducer of a chunk whose result is here."""
        kept = self._flight.kept(chunk.sequence, chunk.offset)
        if kept is None:
            return []
        self.claimed += 1
        return [Send(to, kept[0], None)]

    def supply(self, link: Link, header: Header) -> list[Send]:
        """Send a result that a reducer asks for."""
        kept = self._flight.kept(header.sequence, header.offset)
        if kept is None:
            log.debug("all-reduce %d: a result that was asked for is not kept", header.sequence)
            return []
        self.supplied += 1
        return [Send(link.index, *kept)]

    def give_up(self) -> list[Reset]:
        """Use no reducer any more, nor let any other rank: all of them go another way now."""
        for reducer in range(self._reducers):
            self.map.lose(reducer, Stage(LAST_EPOCH))
        return [self.leave(link) for link in self._links if link.member]

    def renewed_after(self, sequence: int) -> bool:
        """Whether a rank has begun anew since this all-reduce, or a later one, failed there."""
        return sequence <= self._renewed_after

    def renew(self, epoch: int, sequence: int) -> bool:
        """Begin anew with all reducers, as an all-reduce has failed; whether that is news."""
        self._renewed_after = max(sequence, self._renewed_after)
        if epoch <= self.map.epoch:
            return False
        self._renewed = epoch
        self.map.renew(epoch)
        return True

    def news(self, link: Link) -> list[Send]:
        """Return what a reducer is to be told, and the other ranks by it, when it is reached."""
        losses = [self._loss(*loss) for loss in self.map.lost().items()]
        if self._renewed:
            losses.append(Loss(ALL_REDUCERS, self._renewed, self._renewed_after))
        return [Send(link.index, *self._said(loss)) for loss in losses]

    def usable(self) -> list[bool]:
        """Return which reducers this rank could use from now on."""
        reachable = [True] * self._reducers
        for link in self._links:
            reachable[link.reducer] &= link.state is LinkState.MEMBER
        return reachable

    def wanted(self) -> bool:
        """Whether this rank could use a reducer that buffers are not cut between."""
        usable, adopted = self.usable(), self.map.adopted is not None
        return any(
            usable[reducer] and (adopted or not self.map.uses(reducer))
            for reducer in range(self._reducers)
            if reducer not in self._hosts
        )

    def agree(self, usable: Sequence[bool]) -> list[int]:
        """Begin a new epoch with the reducers that every rank can use.

        Returns:
            Those among them that this rank cannot.
        """
        self.map.agree(usable)
        return [
            link.reducer
            for link in self._links
            if self.map.uses(link.reducer) and link.reducer not in self._hosts and not link.member
        ]

    def _matters(self, reducer: int, epoch: int) -> bool:
        """Whether anything may be missing at some rank that a reducer carried up to an epoch."""
        return any(
            chunk.epoch <= epoch
            for link in self._links
            if link.reducer == reducer
            for chunk in self._flight.carried(link.index)
        )

    def _said(self, loss: Loss) -> tuple[bytes, bytes]:
        return self._header(MessageType.SHARD_MAP).pack(), encode(loss)

    def _loss(self, reducer: int, stage: Stage) -> Loss:
        process = self._processes.get(reducer, "")
        return Loss(reducer, stage.epoch, stage=stage.number, incarnation=process)
