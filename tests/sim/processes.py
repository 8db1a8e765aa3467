"""The simulated processes: real sessions and real engines, which may stop, die and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reducer.errors import LocalProtocolError
from tests.engine.twins import Served, session
from tests.sim.connection import Connection, Message
from worker_client.protocol.actions import Connect, Finish, HandOver, Reset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.world import World
    from worker_client.protocol.operation import Operation
    from worker_client.protocol.spec import Settings

MEMORY_LIMIT = 1 << 30
TICK_S = 0.1


class Process:
    """What can be stopped and can die. What happens to it while it is stopped waits."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.stopped = False
        self._waiting: list[Callable[[], None]] = []

    def do(self, work: Callable[[], None]) -> None:
        """Do something now, or when it goes on."""
        if self.stopped and self.alive:
            self._waiting.append(work)
        elif self.alive:
            work()

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if self.alive and not self.stopped:
            self.stopped = True
            self.world.clock.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        for at, work in enumerate(waiting):
            if self.stopped:
                self._waiting += waiting[at:]
                return
            self.do(work)


class Reducer(Process):
    """One start of a reducer: an engine, and the connections to it."""

    def __init__(self, world: World, index: int, address: str) -> None:
        super().__init__(world)
        self.index = index
        self.served = Served(world.implementation, memory_limit=MEMORY_LIMIT, address=address)
        self.served.engine.tick(world.clock.now)
        self.connections: dict[bytes, Connection] = {}
        self.dies_after: int | None = None  # so many more sends
        self._tick()

    def arrived(self, connection: Connection, message: Message) -> None:
        """Take a message."""
        self.do(lambda: self._send(self.served.receive(connection.name, *message)))

    def broken(self, connection: Connection) -> None:
        """Hear that a connection is gone; libzmq tells only when something is sent there."""
        self.connections.pop(connection.name, None)

    def die(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.alive = False
            self.world.note(f"reducer {self.index} dies")
            for connection in list(self.connections.values()):
                connection.close(1)

    def _send(self, sends: list[Any]) -> None:
        for peer, header, payload in sends:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.die()
            if not self.alive:
                return
            connection = self.connections.get(peer)
            if connection is None:
                self._send(self.served.engine.unreachable(peer))
            else:
                body = None if payload is None else bytes(payload)
                connection.send(1, Message(header, body))

    def _tick(self) -> None:
        self.do(lambda: self._send(self.served.engine.tick(self.world.clock.now)))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)


class Worker(Process):
    """One rank: a session, its connections, and how each of its all-reduces ended."""

    def __init__(self, world: World, settings: Settings) -> None:
        super().__init__(world)
        self.rank = settings.rank
        self.session = session(world.implementation, settings)
        self.connections: dict[int, Connection] = {}
        self._old: dict[int, Connection] = {}  # that were lost, by link
        self.ended: dict[int, Exception | None] = {}
        self.open: dict[int, tuple[list[Operation], list[Finish]]] = {}  # calls, and their ends
        self.started = 0
        for link in self.session.links:
            self._connect(link.index, 0.0)
        self._tick()

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce."""
        self._act(self.session.submit(operation, self.world.clock.now))

    def leave(self) -> None:
        """Say goodbye."""
        self._act(self.session.close(LocalProtocolError("left")))
        self.alive = False

    def die(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.alive = False
            self.world.note(f"rank {self.rank} dies")
            for connection in list(self.connections.values()):
                connection.close(0)
            if self.world.group:
                self.world.group.go_on()

    def arrived(self, connection: Connection, message: Message) -> None:
        """Take a message."""
        self.do(lambda: self._arrived(connection, message))

    def _arrived(self, connection: Connection, message: Message) -> None:
        if self.connections.get(connection.link) is connection:
            now = self.world.clock.now
            self._act(self.session.receive(connection.link, *message, now))

    def broken(self, connection: Connection) -> None:
        """Hear that a connection is gone."""
        self.do(lambda: self._broken(connection))

    def _broken(self, connection: Connection) -> None:
        link = connection.link
        if self.connections.get(link) is connection:
            self._old[link] = self.connections.pop(link)
            actions = self.session.disconnected(link, "was cut")
            self._act(actions)
            if Reset(link) not in actions:
                self._connect(link, 0.05)

    def _connect(self, link: int, seconds: float) -> None:
        seconds += self.world.rng.uniform(0.0, 0.1)
        self.world.clock.after(seconds, lambda: self.do(lambda: self._reach(link)))

    def _reach(self, link: int) -> None:
        if link in self.connections:
            return
        connection = self.world.connect(self, link)
        if connection is None:
            self._connect(link, 0.1)
            return
        self.connections[link] = connection
        self._act(self.session.connected(link))

    def _reset(self, link: int) -> None:
        if link in self.connections:
            self._old[link] = self.connections.pop(link)
            self._old[link].close(0)
        self._connect(link, 0.05)
        self._release_later(link, self._old.get(link))

    def _release_later(self, link: int, connection: Connection | None) -> None:
        self.world.clock.after(0.002, lambda: self.do(lambda: self._release(link, connection)))

    def _release(self, link: int, connection: Connection | None) -> None:
        if connection is not None and connection.leaving:
            self._release_later(link, connection)
        else:
            self._act(self.session.released(link))

    def _act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                self.finish(action)
            elif isinstance(action, Reset):
                self._reset(action.link)
            elif isinstance(action, HandOver):
                self.world.group.take(self, action.calls)
            else:
                assert not isinstance(action, Connect), "simulated reducers have one lane each"
                self._send(action)
        for send in self.session.flight.refill(self.world.clock.now):
            self._send(send)

    def finish(self, finish: Finish) -> None:
        """Take note of the end of an all-reduce, after a look at who else uses its buffer."""
        number = self.world.number_of(finish.operation)
        assert number not in self.ended, f"rank {self.rank}: call {number} ended twice"
        if finish.error is None:
            reads = [*self.connections.values(), *self._old.values()]
            mine = [view for connection in reads for view in connection.leaving]
            mine = [view for view in mine if getattr(view, "obj", 0) is finish.operation.view.obj]
            assert not mine, "a buffer is given back that is still read"
        lacking, ends = self.open[number]
        lacking.remove(finish.operation)
        ends.append(finish)
        if not lacking:
            del self.open[number]
            self.ended[number] = next((end.error for end in ends if end.error is not None), None)
            self.world.ended(self, number, ends)

    def _send(self, send: Any) -> None:
        connection = self.connections.get(send.link)
        if connection is not None:
            connection.send(0, Message(send.header, send.payload))

    def _tick(self) -> None:
        self.do(lambda: self._act(self.session.tick(self.world.clock.now)))
        if self.alive:
            self.world.clock.after(TICK_S, self._tick)
