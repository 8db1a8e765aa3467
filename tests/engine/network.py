"""Real sessions and real engines, joined by queues instead of sockets.

Every connection is a pair of queues. Whoever drives the network chooses which message is delivered
next; between queues every order is possible, within one there is only one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError, ReductionError
from tests.engine.twins import Served, session
from worker_client.session import Finish, Session
from worker_client.settings import Settings

if TYPE_CHECKING:
    from reducer.reductions import Send as EngineSend
    from worker_client.flight import Send
    from worker_client.operation import Operation

MEMORY_LIMIT = 1 << 30


@dataclass
class Worker:
    """One rank: its session, and how each of its all-reduces ended."""

    session: Session
    started: list[Operation] = field(default_factory=list)
    ended: dict[int, ReductionError | None] = field(default_factory=dict)
    present: bool = True


class Network:
    """`world_size` workers of one job and their reducers."""

    def __init__(
        self,
        world_size: int,
        reducers: int,
        chunk_bytes: int,
        window: int = 4096,
        implementation: str = "compiled",
    ) -> None:
        self.now = 0.0
        addresses = tuple(f"reducer-{index}:1" for index in range(reducers))
        self.served = [
            Served(implementation, memory_limit=MEMORY_LIMIT, address=address)
            for address in addresses
        ]
        self.engines = [served.engine for served in self.served]
        common = (world_size, addresses, window, chunk_bytes)
        self.workers = [
            Worker(session(implementation, Settings("job", 0, rank, *common)))
            for rank in range(world_size)
        ]
        pairs = [(rank, index) for rank in range(world_size) for index in range(reducers)]
        self.up: dict[tuple[int, int], deque] = {pair: deque() for pair in pairs}
        self.down: dict[tuple[int, int], deque] = {pair: deque() for pair in pairs}
        self.lives = dict.fromkeys(pairs, 0)  # connections that each pair has had before
        self.cut_off: set[tuple[int, int]] = set()
        self.was_cut: set[int] = set()  # ranks that have lost a connection

    def connect(self) -> None:
        for rank, index in self.up:
            self.do(rank, self.workers[rank].session.connected(index))

    def submit(self, rank: int, operation: Operation) -> None:
        worker = self.workers[rank]
        worker.started.append(operation)
        self.do(rank, worker.session.submit(operation, self.now))

    def leave(self, rank: int) -> None:
        """GOODBYE: whatever was said before it still arrives."""
        worker = self.workers[rank]
        worker.present = False
        self.do(rank, worker.session.close(LocalProtocolError("left")))

    def lose(self, rank: int) -> None:
        """The process dies: what it had not yet delivered is gone, and the reducers notice."""
        worker = self.workers[rank]
        worker.present = False
        for index, engine in enumerate(self.engines):
            self.up[rank, index].clear()
            self.down[rank, index].clear()
            self.pass_on(index, engine.unreachable(self.peer(rank, index)))
            self.lives[rank, index] += 1
        for sequence in range(len(worker.started)):
            worker.ended.setdefault(sequence, LocalProtocolError("died"))

    def cut(self, rank: int, index: int, noticed: bool) -> None:
        """A connection breaks; the reducer may notice only when it next sends something."""
        self.up[rank, index].clear()
        self.down[rank, index].clear()
        old = self.peer(rank, index)
        self.lives[rank, index] += 1
        self.cut_off.add((rank, index))
        self.was_cut.add(rank)
        if noticed:
            self.pass_on(index, self.engines[index].unreachable(old))
        self.do(rank, self.workers[rank].session.disconnected(index, "was cut"))

    def mend(self, rank: int, index: int) -> None:
        """The worker's transport connects again."""
        self.cut_off.remove((rank, index))
        if self.workers[rank].present:
            self.do(rank, self.workers[rank].session.connected(index))

    def waiting(self) -> list[deque]:
        """Queues that hold a message, in a fixed order."""
        return [queue for side in (self.up, self.down) for queue in side.values() if queue]

    def deliver(self, queue: deque) -> None:
        """Deliver the first message of a queue."""
        header, payload = queue.popleft()
        for pair, candidate in self.up.items():
            if candidate is queue:
                rank, index = pair
                self.pass_on(index, self.receive(rank, index, header, payload))
                return
        rank, index = next(pair for pair, candidate in self.down.items() if candidate is queue)
        self.do(rank, self.workers[rank].session.receive(index, header, payload, self.now))

    def deliver_all(self) -> None:
        while queues := self.waiting():
            for queue in queues:
                while queue:
                    self.deliver(queue)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for rank, worker in enumerate(self.workers):
            if worker.present:
                self.do(rank, worker.session.tick(self.now))
        for index, engine in enumerate(self.engines):
            self.pass_on(index, engine.tick(self.now))

    def do(self, rank: int, actions: list) -> None:
        worker = self.workers[rank]
        for action in actions:
            if isinstance(action, Finish):
                assert action.operation.sequence not in worker.ended, "ended twice"
                worker.ended[action.operation.sequence] = action.error
            else:
                self.put(rank, action)
        for send in worker.session.flight.refill(self.now):
            self.put(rank, send)

    def put(self, rank: int, send: Send) -> None:
        # What is on the wire no longer changes with the buffer.
        payload = b"" if send.payload is None else bytes(send.payload)
        self.up[rank, send.link].append((send.header, payload))

    def pass_on(self, index: int, sends: list[EngineSend]) -> None:
        for send in sends:
            rank = int(send.peer.split(b"/")[0])
            if send.peer != self.peer(rank, index) or (rank, index) in self.cut_off:
                self.pass_on(index, self.engines[index].unreachable(send.peer))
                continue
            payload = b"" if send.payload is None else bytes(send.payload)
            self.down[rank, index].append((send.header, payload))

    def receive(self, rank: int, index: int, header: bytes, payload: bytes) -> list[EngineSend]:
        return self.served[index].receive(self.peer(rank, index), header, payload)

    def peer(self, rank: int, index: int) -> bytes:
        """How a reducer's transport calls a connection."""
        return f"{rank}/{index}/{self.lives[rank, index]}".encode()
