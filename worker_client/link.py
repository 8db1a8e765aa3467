"""A worker's end of its connection to one reducer: state, window, chunks waiting and in flight."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from reducer.wire.layout import charge
from reducer.wire.states import LinkState

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from reducer.wire.layout import Chunk
    from worker_client.operation import Operation


class Link:
    """One link (sans I/O).

    Attributes:
        index: which of the job's reducers this is.
        address: ``host:port``, for errors.
        state: as in `reducer.wire.states`.
        up: whether the transport is connected.
        window: bytes that may be in flight here.
        in_flight: bytes of contributions whose result has not come.
        queue: chunks not yet sent, in order.
        sent: chunks in flight, by (sequence, offset).
        refusal: why the reducer refused the HELLO, if it did.
        owed: all-reduces that failed while this link was away, by sequence number: the reducer is
            told when it is back.
    """

    __slots__ = (
        "address",
        "in_flight",
        "index",
        "owed",
        "queue",
        "refusal",
        "sent",
        "state",
        "up",
        "window",
    )

    def __init__(self, index: int, address: str, window: int) -> None:
        self.index = index
        self.address = address
        self.window = window
        self.state = LinkState.STRANGER
        self.up = False
        self.in_flight = 0
        self.queue: deque[tuple[Operation, Chunk]] = deque()
        self.sent: dict[tuple[int, int], Chunk] = {}
        self.refusal: ReductionError | None = None
        self.owed: dict[int, ReductionError] = {}

    @property
    def member(self) -> bool:
        """Whether contributions may be sent here."""
        return self.state in {LinkState.MEMBER, LinkState.DRAINING}

    def next_chunk(self, limit: int) -> tuple[Operation, Chunk] | None:
        """Take the next chunk to send, if the window has room for it.

        Args:
            limit: sequence number from which on nothing may be sent yet.
        """
        while self.queue and self.queue[0][0].finished:
            self.queue.popleft()
        if not self.queue or not self.member:
            return None
        operation, chunk = self.queue[0]
        if operation.sequence >= limit:
            return None
        if self.in_flight and self.in_flight + charge(chunk.nbytes) > self.window:
            return None
        self.queue.popleft()
        self.sent[operation.sequence, chunk.offset] = chunk
        self.in_flight += charge(chunk.nbytes)
        return operation, chunk

    def settle(self, sequence: int, offset: int) -> Chunk | None:
        """Take a chunk out of flight; None if it was not in flight."""
        chunk = self.sent.pop((sequence, offset), None)
        if chunk is not None:
            self.in_flight -= charge(chunk.nbytes)
        return chunk

    def forget(self, sequence: int) -> None:
        """Take all chunks of one all-reduce out of flight."""
        for key in [key for key in self.sent if key[0] == sequence]:
            self.settle(*key)

    def waits_for(self, sequence: int) -> bool:
        """Whether a chunk of this all-reduce is in flight here."""
        return any(key[0] == sequence for key in self.sent)

    def reset(self) -> None:
        """Forget everything about a connection that is gone."""
        self.up = False
        self.state = LinkState.STRANGER
        self.in_flight = 0
        self.queue.clear()
        self.sent.clear()
