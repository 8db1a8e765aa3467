"""A session, and what it asks for as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from worker_client.protocol.flight import (
    AddStreams,
    Connect,
    Finish,
    HandOver,
    MakeResumable,
    Reset,
    Send,
)
from worker_client.protocol.operation import Operation
from worker_client.protocol.session import Session

if TYPE_CHECKING:
    from reducer.wire.constants import DType, ReduceOp
    from worker_client.protocol.flight import Action
    from worker_client.protocol.spec import JobSpec


class Call(NamedTuple):
    """One all-reduce: chunks that went out (offset, length), and what came for each offset."""

    nbytes: int
    sent: set[tuple[int, int]]
    results: dict[int, list[bytes]]


class Worker:
    """One session, whose actions are followed by what its flight then sends."""

    def __init__(self, spec: JobSpec) -> None:
        self.session = Session(spec)
        self.operations: list[Operation] = []

    def submit(self, nbytes: int, dtype: DType, op: ReduceOp, now: float) -> list[Action]:
        """Begin an all-reduce of zeros, by its number in the order of calls."""
        view = memoryview(bytearray(nbytes))
        self.operations.append(Operation(view, dtype, op, "it", 5.0))
        return self.session.submit(self.operations[-1], now)

    def number(self, operation: Operation) -> int:
        """Return which call this was, -1 if it is a question of the session's own."""
        mine = enumerate(self.operations)
        return next((at for at, own in mine if own is operation), -1)

    def say(self, action: Action) -> tuple[Any, ...]:
        """Describe an action, as values."""
        if isinstance(action, Send):
            payload = b"" if action.payload is None else bytes(action.payload)
            return "send", action.link, bytes(action.header), payload
        if isinstance(action, Finish):
            at, error = self.number(action.operation), action.error
            return "finish", at, error and type(error), str(error), bytes(action.operation.view)
        if isinstance(action, HandOver):
            unfinished = [call.operation for call in action.calls if call.operation is not None]
            return "hand over", tuple(map(self.number, unfinished))
        kinds = {
            Reset: "reset",
            AddStreams: "add streams",
            MakeResumable: "keep",
            Connect: "connect",
        }
        return kinds[type(action)], *action

    def do(self, actions: list[Action], now: float) -> list[tuple[Any, ...]]:
        """Return what a session asks for, and what its flight then sends."""
        said = [self.say(action) for action in actions]
        return said + [self.say(send) for send in self.session.flight.refill(now)]
