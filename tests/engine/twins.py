"""Engines with either implementation of what is frequent."""

from reducer import kernels
from reducer.engine.engine import Engine
from reducer.runtime import implementation
from reducer.wire.constants import COMPILED_FEATURES

IMPLEMENTATIONS = implementation.NAMES


class Served:
    """An engine and, with the compiled implementation, what the loop takes before it."""

    starts = 0

    def __init__(self, name, *, process="", **settings):
        Served.starts += 1
        table = kernels.select()
        chosen = implementation.select(name, table)
        assert chosen.name == name
        self.engine = Engine(
            table,
            chosen.slots,
            incarnation=process or f"{Served.starts:x}",
            features=COMPILED_FEATURES,
            **{"memory_limit": 1 << 30, **settings},
        )
        self.taken = 0  # messages that never reached the engine
        self._core = None
        if name == "compiled":
            from reducer.runtime._loop import Core  # noqa: PLC0415

            self._core = Core(self.engine)

    def receive(self, peer, header, payload, key="", at=0.0):
        sends = self._core and self._core.offer(peer, header, payload, at)
        if sends is None:
            return self.engine.receive(peer, header, payload, key, at=at)
        self.taken += 1
        return sends
