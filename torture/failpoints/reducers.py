"""A reducer's engine, kernels and transport with failpoints around them.

The plain loop needs no more; in the compiled one they see what it leaves to Python, and `loop.c`
passes the places of the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from reducer import server
from reducer.engine.actions import Send
from reducer.engine.engine import Engine
from reducer.runtime import implementation
from reducer.wire.constants import MessageType
from torture.failpoints import REDUCER_LOOP, Place, arm, arm_module, message_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from reducer.engine.actions import Action
    from reducer.kernels import Kernels
    from reducer.kernels.plain import BytesLike
    from reducer.runtime.implementation import Implementation
    from reducer.runtime.plain_transport import PlainTransport as _AnyTransport
    from reducer.wire.constants import DType, ReduceOp
    from reducer.wire.header import Buffer
    from torture.failpoints import Failpoint
else:
    _AnyTransport = object  # the real one comes after this among the bases


def install(failpoints: Sequence[Failpoint]) -> None:
    """Have the reducers that this process makes from now on pass failpoints."""
    select = implementation.select

    def select_faulty(name: str | None, kernels: Kernels) -> Implementation:
        chosen = select(name, kernels)
        compiled = chosen.name == "compiled"
        hit = arm_module(REDUCER_LOOP, failpoints) if compiled else arm(failpoints)
        mock.patch.object(server, "Engine", partial(FaultyEngine, hit)).start()
        faulty = (_FaultyTransport, chosen.transport)
        transport: Any = type("FaultyTransport", faulty, {"_hit": staticmethod(hit)})
        return chosen._replace(transport=transport)

    mock.patch.object(implementation, "select", select_faulty).start()


class _FaultyTransport(_AnyTransport):
    """A transport whose WELCOMEs, and contributions that Python receives, pass failpoints."""

    _hit: Callable[[Place], bool]

    def receive(self, timeout_s: float) -> Iterator[tuple[bytes, Buffer, Buffer, str]]:
        """Yield messages that are not dropped."""
        for message in super().receive(timeout_s):
            contribution = message_type(message[1]) == MessageType.CONTRIBUTION
            if not (contribution and self._hit(Place.REDUCER_RECEIVED)):
                yield message

    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Send a message, unless it is dropped."""
        welcome = message_type(header) == MessageType.WELCOME
        if welcome and self._hit(Place.REDUCER_WELCOME):
            return True
        return super().send(peer, header, payload)


class FaultyEngine(Engine):
    """An engine that passes failpoints before, between and after what it does.

    Args:
        hit: what `arm` of the chosen implementation returned; the rest is `Engine`'s.
        kernels: what sums.
    """

    def __init__(self, hit: Callable[[Place], bool], kernels: Kernels, *rest: Any, **more: Any):
        super().__init__(_FaultyKernels(hit, kernels), *rest, **more)
        self._hit = hit
        self._real_kernels = kernels

    @property
    def kernels(self) -> Kernels:
        """What sums in the compiled loop, which passes the places itself."""
        return self._real_kernels

    # The loop sends each message before it takes the next one, so that here is between two sends.
    def receive(  # type: ignore[override]
        self, peer: bytes, frame: Buffer, payload: Buffer, key: str = "", *, at: float = 0.0
    ) -> Iterator[Action]:
        """Take one message and yield the answers that are not dropped."""
        placed, summed = self.counters.contributions, self.counters.results
        actions = super().receive(peer, frame, payload, key, at=at)
        results = self.counters.results - summed
        if self.counters.contributions > placed and not results:
            self._hit(Place.REDUCER_PLACED)
        if results and self._hit(Place.REDUCER_AFTER_SUM):
            actions = [action for action in actions if not isinstance(action, Send)]
        sent = 0
        for action in actions:
            result = isinstance(action, Send) and message_type(action.header) == MessageType.RESULT
            if not result:
                yield action
                continue
            if sent != 1 or not self._hit(Place.REDUCER_BETWEEN_RESULTS):
                yield action
            sent += 1
            if sent == results:
                self._hit(Place.REDUCER_AFTER_RESULTS)

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        self._hit(Place.REDUCER_TICK)
        return super().tick(now)


class _FaultyKernels:
    """Kernels that pass failpoints before they sum."""

    def __init__(self, hit: Callable[[Place], bool], kernels: Kernels) -> None:
        self.name = kernels.name
        self._hit = hit
        self._kernels = kernels

    def reduce(
        self, inputs: Sequence[BytesLike], out: BytesLike, dtype: DType, op: ReduceOp
    ) -> None:
        self._hit(Place.REDUCER_PLACED)
        self._hit(Place.REDUCER_BEFORE_SUM)
        self._kernels.reduce(inputs, out, dtype, op)
