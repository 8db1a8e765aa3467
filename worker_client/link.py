"""A worker's end of its connection to one reducer: who is there, and what it is owed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from reducer.errors import ReductionError


class Link:
    """One link (sans I/O); what travels over it, the flight knows.

    Attributes:
        index: which of the worker's links this is.
        reducer: which of the job's reducers it leads to.
        lane: to which of that reducer's threads.
        address: ``host:port``, for errors.
        state: as in `reducer.wire.states`.
        up: whether the transport is connected.
        refusal: why the reducer refused the HELLO, if it did.
        owed: all-reduces that failed while this link was away, by sequence number: the reducer is
            told when it is back.
    """

    __slots__ = ("address", "index", "lane", "owed", "reducer", "refusal", "state", "up")

    def __init__(self, index: int, reducer: int, lane: int, address: str) -> None:
        self.index = index
        self.reducer = reducer
        self.lane = lane
        self.address = address
        self.state = LinkState.STRANGER
        self.up = False
        self.refusal: ReductionError | None = None
        self.owed: dict[int, ReductionError] = {}

    @property
    def member(self) -> bool:
        """Whether contributions may be sent here."""
        return self.state in {LinkState.MEMBER, LinkState.DRAINING}
