"""A worker's end of its connection to one reducer: who is there, and what it is yet to be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reducer.errors import ReductionError
    from reducer.wire.header import Header
    from reducer.wire.messages import Hello, Straggler


class Failed(NamedTuple):
    """All-reduces that have failed at this rank, first to last."""

    first: int
    last: int
    error: ReductionError


@dataclass(eq=False, slots=True)
class Link:
    """One link (sans I/O); what travels over it, the flight knows.

    Attributes:
        index: which of the worker's links this is.
        reducer: which of the job's reducers it leads to.
        lane: to which of that reducer's threads.
        address: ``host:port``, for errors.
        state: as in `reducer.wire.states`.
        up: whether the transport is connected.
        round_trip_s: the shortest of that connection when it was made; 0 if that is not known.
        incarnation: what the reducer called itself when it welcomed us last; "" if it never did.
        spent: the one that was lost with something in progress, and the last all-reduce of that.
        unreachable: why, while it is not connected.
        refusal: why the reducer refused the HELLO, if it did.
        hello: what was said last in the attempt to join.
        proof: with which the reducer has to answer, if it must prove that it is the job's; "" else.
        ticket: what further connections of the link have to show; "" if there are to be none.
        resumes: a connection of the link that breaks goes on over another one.
        untold: what has failed here, of which the reducer is to be told when it can be.
        straggler: the rank that the others wait for, as the reducer has said last.
    """

    index: int
    reducer: int
    lane: int
    address: str
    state: LinkState = LinkState.NOT_JOINED
    up: bool = False
    round_trip_s: float = 0.0
    incarnation: str = ""
    spent: tuple[str, int] = ("", -1)
    unreachable: str = "is not connected"
    refusal: ReductionError | None = None
    hello: tuple[Header, Hello] | None = None
    proof: str = ""
    ticket: str = ""
    resumes: bool = False
    untold: list[Failed] = field(default_factory=list)
    straggler: Straggler | None = None

    @property
    def member(self) -> bool:
        """Whether contributions may be sent here."""
        return self.state in {LinkState.MEMBER, LinkState.DRAINING}

    def spend(self, carried: Iterable[int]) -> None:
        """Record the all-reduces in progress here, as the reducer is lost."""
        latest = max(carried, default=-1)
        if latest >= 0:
            self.spent = self.incarnation, latest

    def knows(self, reached: int) -> bool:
        """Whether the reducer had a part of what is in progress when it lost us.

        Args:
            reached: all below this number is finished at every rank.
        """
        incarnation, latest = self.spent
        return incarnation == self.incarnation and latest >= reached

    def disconnect(self) -> None:
        """Record that the connection has ended."""
        self.up = False
        self.state = LinkState.NOT_JOINED
