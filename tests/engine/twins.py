"""Engines and sessions with what is frequent compiled, or with its oracle."""

from reducer import kernels
from reducer.engine import _slots
from reducer.engine.actions import Close, Send
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.runtime._loop import Core
from reducer.wire.constants import COMPILED_FEATURES
from tests.twins import slots

SLOTS = {"compiled": _slots, "plain": slots}
IMPLEMENTATIONS = tuple(SLOTS)


class Served:
    """An engine and, with compiled slots, what the loop takes before it."""

    starts = 0

    def __init__(self, name, *, process="", address="here:1", lanes=(), **settings):
        Served.starts += 1
        incarnation = process or f"{Served.starts:x}"
        identity = ReducerIdentity(incarnation, address, lanes, COMPILED_FEATURES)
        settings = {"memory_limit": 1 << 30, **settings}
        self.engine = Engine(kernels.select(), SLOTS[name], identity, **settings)
        self.taken = 0  # messages that never reached the engine
        self._others = []  # what else the engine has asked for than to send
        self._core = Core(self.engine) if name == "compiled" else None

    def perform(self, actions):
        """Do what is the loop's, and return what is to be sent."""
        others = [action for action in actions if not isinstance(action, Send)]
        self._others += others
        for action in others if self._core else ():
            if not isinstance(action, Close):
                self._core.perform(action)
        return [action for action in actions if isinstance(action, Send)]

    def asked_for(self, kind):
        """Return what the engine has asked for of a kind since the last time."""
        found = [action for action in self._others if isinstance(action, kind)]
        self._others = [action for action in self._others if not isinstance(action, kind)]
        return found

    def receive(self, peer, header, payload, key="", at=0.0):
        return self.perform(self.take(peer, header, payload, key, at))

    def take(self, peer, header, payload, key="", at=0.0):
        """Return what is to be done about a message, and do nothing of it."""
        sends = self._core and self._core.offer(peer, header, payload, at)
        if sends is None:
            return self.engine.receive(peer, header, payload, key, at=at)
        self.taken += 1
        return sends
