"""Both implementations of a worker's session, moved on alike: they must ask for the same things."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fuzz.source import check
from fuzz.twins import NAMES
from worker_client.protocol.flight import (
    AddStreams,
    Connect,
    Finish,
    HandOver,
    Keep,
    Reset,
    Send,
)
from worker_client.protocol.operation import Operation
from worker_client.protocol.session import Session
from worker_client.runtime import implementation

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.wire.constants import DType, ReduceOp
    from worker_client.protocol.flight import Action
    from worker_client.protocol.spec import JobSpec


class Call(NamedTuple):
    """One all-reduce: chunks that went out (offset, length), and what came for each offset."""

    nbytes: int
    sent: set[tuple[int, int]]
    results: dict[int, list[bytes]]


class Twin:
    """One session, whose actions are followed by what its flight then sends."""

    def __init__(self, name: str, spec: JobSpec) -> None:
        self.name = name
        self.session = Session(spec, implementation.select(name).flight)
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
        """Describe an action, so that it can be compared with the twin's."""
        if isinstance(action, Send):
            payload = b"" if action.payload is None else bytes(action.payload)
            return "send", action.link, bytes(action.header), payload
        if isinstance(action, Finish):
            at, error = self.number(action.operation), action.error
            return "finish", at, error and type(error), str(error), bytes(action.operation.view)
        if isinstance(action, HandOver):
            unfinished = [call.operation for call in action.calls if call.operation is not None]
            return "hand over", tuple(map(self.number, unfinished))
        kinds = {Reset: "reset", AddStreams: "add streams", Keep: "keep", Connect: "connect"}
        return kinds[type(action)], *action


class Workers:
    """Sessions of all implementations, in step."""

    def __init__(self, spec: JobSpec) -> None:
        self.all = [Twin(name, spec) for name in NAMES]

    @property
    def plain(self) -> Session:
        """The one that is looked into."""
        return self.all[0].session

    def do(self, act: Callable[[Twin], list[Action]], now: float) -> list[tuple[Any, ...]]:
        """Let each do the same; returns what both ask for, which must be the same."""
        asked, *others = [self._act(twin, act, now) for twin in self.all]
        for twin, other in zip(self.all[1:], others, strict=True):
            same = sorted(other, key=repr) == sorted(asked, key=repr)  # in the order of its maps
            check(same, f"plain asks for {asked}, {twin.name} for {other}")
            self._compare(twin.session)
        return asked

    def _act(
        self, twin: Twin, act: Callable[[Twin], list[Action]], now: float
    ) -> list[tuple[Any, ...]]:
        actions = [twin.say(action) for action in act(twin)]
        return actions + [twin.say(send) for send in twin.session.flight.refill(now)]

    def _compare(self, session: Session) -> None:
        plain = self.plain
        for link in plain.links:
            mine, other = (one.flight.stats(link.index) for one in (plain, session))
            check(mine[:5] == other[:5], f"link {link.index}: {mine} is {other}")  # but for times
            check(link.state is session.links[link.index].state, "links are in the same state")
        state = [
            (one.watermark, one.active, one.flight.kept_bytes, one.flight.reached, one.joined)
            for one in (plain, session)
        ]
        check(state[0] == state[1], f"{state[0]} is {state[1]}")
