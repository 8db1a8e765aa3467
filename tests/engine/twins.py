"""Engines and sessions with what is frequent compiled, or with its oracle."""

from reducer import kernels
from reducer.engine import _slots
from reducer.engine.engine import Engine
from reducer.runtime._loop import Core
from reducer.wire.constants import COMPILED_FEATURES
from tests.twins import slots

SLOTS = {"compiled": _slots, "plain": slots}
IMPLEMENTATIONS = tuple(SLOTS)


class Served:
    """An engine and, with compiled slots, what the loop takes before it."""

    starts = 0

    def __init__(self, name, *, process="", **settings):
        Served.starts += 1
        self.engine = Engine(
            kernels.select(),
            SLOTS[name],
            incarnation=process or f"{Served.starts:x}",
            features=COMPILED_FEATURES,
            **{"memory_limit": 1 << 30, **settings},
        )
        self.taken = 0  # messages that never reached the engine
        self._core = Core(self.engine) if name == "compiled" else None

    def receive(self, peer, header, payload, key="", at=0.0):
        sends = self._core and self._core.offer(peer, header, payload, at)
        if sends is None:
            return self.engine.receive(peer, header, payload, key, at=at)
        self.taken += 1
        return sends
