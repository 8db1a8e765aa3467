"""A reducer's engine, kernels and transport with failpoints around them.

They see what the loop leaves to Python; `loop.c` passes the places of the rest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from reducer import server
from reducer.engine.actions import Send
from reducer.engine.engine import Engine
from reducer.runtime import transport
from reducer.wire.constants import MessageType
from torture.failpoints import REDUCER_LOOP, Place, arm_module, message_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from reducer.engine.actions import Action
    from reducer.kernels import Kernels
    from reducer.kernels.plain import BytesLike
    from reducer.wire.constants import DType, ReduceOp
    from reducer.wire.header import Buffer
    from torture.failpoints import Failpoint


def install(failpoints: Sequence[Failpoint]) -> None:
    """Have the reducers that this process makes from now on pass failpoints."""
    hit = arm_module(REDUCER_LOOP, failpoints)
    mock.patch.object(server, "Engine", partial(FaultyEngine, hit)).start()
    faulty = type("FaultyTransport", (_FaultyTransport,), {"_hit": staticmethod(hit)})
    mock.patch.object(transport, "Transport", faulty).start()


class _FaultyTransport(transport.Transport):
    """A transport whose WELCOMEs pass failpoints."""

    _hit: Callable[[Place], bool]

    def send(self, peer: bytes, header: bytes, payload: Buffer | np.ndarray | None) -> bool:
        """Send a message, unless it is dropped."""
        welcome = message_type(header) == MessageType.WELCOME
        if welcome and self._hit(Place.REDUCER_WELCOME):
            return True
        return super().send(peer, header, payload)


class FaultyEngine(Engine):
    """An engine that passes failpoints before, between and after what it does.

    Args:
        hit: what `arm_module` returned; the rest is `Engine`'s.
        kernels: what sums.
    """

    def __init__(self, hit: Callable[[Place], bool], kernels: Kernels, *rest: Any, **more: Any):
        super().__init__(_FaultyKernels(hit, kernels), *rest, **more)
        self._hit = hit
        self._real_kernels = kernels

    @property
    def kernels(self) -> Kernels:
        """What sums in the loop, which passes the places itself."""
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

    def reduce_leaves(
        self,
        inputs: Sequence[BytesLike],
        ends: Sequence[int],
        out: BytesLike,
        dtype: DType,
        op: ReduceOp,
    ) -> None:
        self._hit(Place.REDUCER_PLACED)
        self._hit(Place.REDUCER_BEFORE_SUM)
        self._kernels.reduce_leaves(inputs, ends, out, dtype, op)
