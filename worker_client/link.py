"""A worker's end of its connection to one reducer: who is there, and what it is owed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from reducer.errors import ReductionError


class Owed(NamedTuple):
    """All-reduces that have failed here, of which the reducer has yet to be told: first to last."""

    first: int
    last: int
    error: ReductionError


class Link:
    """One link (sans I/O); what travels over it, the flight knows.

    Attributes:
        index: which of the worker's links this is.
        reducer: which of the job's reducers it leads to.
        lane: to which of that reducer's threads.
        address: ``host:port``, for errors.
        state: as in `reducer.wire.states`.
        up: whether the transport is connected.
        closing: closed, but what it sent may still be read from callers' memory.
        refusal: why the reducer refused the HELLO, if it did.
        owed: what the reducer is to be told when it can be.
    """

    __slots__ = (
        "address",
        "closing",
        "index",
        "lane",
        "owed",
        "reducer",
        "refusal",
        "state",
        "up",
    )

    def __init__(self, index: int, reducer: int, lane: int, address: str) -> None:
        self.index = index
        self.reducer = reducer
        self.lane = lane
        self.address = address
        self.state = LinkState.STRANGER
        self.up = False
        self.closing = False
        self.refusal: ReductionError | None = None
        self.owed: Owed | None = None

    @property
    def member(self) -> bool:
        """Whether contributions may be sent here."""
        return self.state in {LinkState.MEMBER, LinkState.DRAINING}

    def owe(self, sequence: int, error: ReductionError) -> None:
        """Take note that an all-reduce has failed, of which the reducer cannot be told now."""
        first, last, why = self.owed or (sequence, sequence, error)
        self.owed = Owed(min(first, sequence), max(last, sequence), why)

    def disconnect(self) -> None:
        """Take note that the connection has ended."""
        self.up = False
        self.state = LinkState.STRANGER

    def close(self) -> None:
        """Take note that the connection is given up."""
        self.disconnect()
        self.closing = True
