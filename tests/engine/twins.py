"""Engines and sessions with either implementation of what is frequent."""

from reducer import kernels
from reducer.engine.actions import Close, Send
from reducer.engine.admission import ReducerIdentity
from reducer.engine.engine import Engine
from reducer.runtime import implementation
from reducer.wire.constants import COMPILED_FEATURES
from worker_client.protocol.session import Session
from worker_client.runtime import implementation as worker_implementation

IMPLEMENTATIONS = implementation.NAMES


def session(name, spec):
    chosen = worker_implementation.select(name)
    assert chosen.name == name
    return Session(spec, chosen.flight)


class Served:
    """An engine and, with the compiled implementation, what the loop takes before it."""

    starts = 0

    def __init__(self, name, *, process="", address="here:1", lanes=(), **settings):
        Served.starts += 1
        table = kernels.select()
        chosen = implementation.select(name, table)
        assert chosen.name == name
        incarnation = process or f"{Served.starts:x}"
        identity = ReducerIdentity(incarnation, address, lanes, COMPILED_FEATURES)
        settings = {"memory_limit": 1 << 30, **settings}
        self.engine = Engine(table, chosen.slots, identity, **settings)
        self.taken = 0  # messages that never reached the engine
        self._others = []  # what else the engine has asked for than to send
        self._core = None
        if name == "compiled":
            from reducer.runtime._loop import Core  # noqa: PLC0415

            self._core = Core(self.engine)

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
