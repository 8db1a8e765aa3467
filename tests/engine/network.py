"""Real sessions and real engines, joined by queues instead of sockets.

Every connection is a pair of queues. Whoever drives the network chooses which message is delivered
next; between queues every order is possible, within one there is only one. A connection that a
session closes is gone with both its queues; when the reducer notices, and when the session hears
that its memory is not read any more, is for `prompt` to say.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from reducer.errors import LocalProtocolError, ReductionError
from tests.engine.twins import Served
from worker_client.protocol.flight import Finish, Reset
from worker_client.protocol.operation import Operation
from worker_client.protocol.session import Session
from worker_client.protocol.spec import JobSpec

MEMORY_LIMIT = 1 << 30


@dataclass
class Worker:
    """One rank: its session, and its all-reduces, by the number of the call.

    Attributes:
        ended: how they ended.
        amid: the calls before that had not ended when each was made.
        joined: it has been welcome at every reducer that was in use then.
    """

    session: Session
    started: list[Operation] = field(default_factory=list)
    ended: dict[int, ReductionError | None] = field(default_factory=dict)
    amid: list[set[int]] = field(default_factory=list)
    present: bool = True
    joined: bool = False

    def number(self, operation):
        """Which call this was; a question of the session's own counts in sequence numbers alone."""
        return next(at for at, mine in enumerate(self.started) if mine is operation)


class Network:
    """`world_size` workers of one job and their reducers.

    Attributes:
        cut_off: pairs of rank and reducer without a connection.
        was_cut: pairs whose connection broke; not those that a session closed.
        later: what reducers and sessions have yet to notice.
        prompt: whether the next such thing is noticed at once.
    """

    def __init__(self, world_size, reducers, chunk_bytes, window=4096, implementation="compiled"):
        self.now = 0.0
        self.implementation = implementation
        addresses = tuple(f"reducer-{index}:1" for index in range(reducers))
        self.served = [self._serve(address) for address in addresses]
        self.addresses = addresses
        common = (world_size, addresses, window, chunk_bytes)
        self.workers = [
            Worker(Session(JobSpec("job", 0, rank, *common))) for rank in range(world_size)
        ]
        pairs = [(rank, index) for rank in range(world_size) for index in range(reducers)]
        self.up = {pair: deque() for pair in pairs}
        self.down = {pair: deque() for pair in pairs}
        self.lives = dict.fromkeys(pairs, 0)  # connections that each pair has had before
        self.cut_off = set()
        self.was_cut = set()
        self.later = []
        self.prompt = lambda: True

    def _serve(self, address):
        return Served(self.implementation, memory_limit=MEMORY_LIMIT, address=address)

    @property
    def engines(self):
        return [served.engine for served in self.served]

    def connect(self):
        for rank, index in self.up:
            self.do(rank, self.workers[rank].session.connected(index))

    def submit(self, rank, operation):
        worker = self.workers[rank]
        worker.amid.append(set(range(len(worker.started))) - worker.ended.keys())
        worker.started.append(operation)
        self.do(rank, worker.session.submit(operation, self.now))

    def leave(self, rank):
        """GOODBYE: whatever was said before it still arrives, then connections end."""
        worker = self.workers[rank]
        worker.present = False
        self.do(rank, worker.session.close(LocalProtocolError("left")))
        for index in range(len(self.served)):
            self.end_if_left(rank, index)

    def lose(self, rank):
        """The process dies: what it had not yet delivered is gone, and the reducers notice."""
        worker = self.workers[rank]
        worker.present = False
        for index in range(len(self.served)):
            self.break_off(rank, index, at_once=True)
        for number in range(len(worker.started)):
            worker.ended.setdefault(number, LocalProtocolError("died"))

    def break_off(self, rank, index, at_once):
        """End a connection; the reducer may notice only when it next sends something."""
        self.up[rank, index].clear()
        self.down[rank, index].clear()
        old = self.peer(rank, index)
        self.lives[rank, index] += 1
        self.cut_off.add((rank, index))
        served = self.served[index]
        self.notice(lambda: self.pass_on(index, served.engine.unreachable(old), served), at_once)

    def end_if_left(self, rank, index):
        """End the connection of a rank that has left when all that it said has arrived."""
        pair = rank, index
        if not (self.workers[rank].present or self.up[pair] or pair in self.cut_off):
            self.break_off(rank, index, self.prompt())

    def notice(self, event, at_once):
        if at_once:
            event()
        else:
            self.later.append(event)

    def cut(self, rank, index, noticed):
        """A connection breaks."""
        self.was_cut.add((rank, index))
        self.break_off(rank, index, noticed)
        self.do(rank, self.workers[rank].session.disconnected(index, "was cut"))

    def restart(self, index):
        """A reducer dies, and another one takes its place; it knows nobody."""
        self.served[index] = self._serve(self.addresses[index])
        self.engines[index].tick(self.now)
        ranks = range(len(self.workers))
        connected = [rank for rank in ranks if (rank, index) not in self.cut_off]
        for rank in connected:
            self.was_cut.add((rank, index))
            self.break_off(rank, index, at_once=True)
        for rank in connected:
            if self.workers[rank].present:
                self.do(rank, self.workers[rank].session.disconnected(index, "died"))

    def close(self, rank, index):
        """The session closes a connection, broken or not; its transport then connects anew."""
        if (rank, index) not in self.cut_off:
            self.break_off(rank, index, self.prompt())

    def mend(self, rank, index):
        """The worker's transport connects again."""
        self.cut_off.remove((rank, index))
        if self.workers[rank].present:
            self.do(rank, self.workers[rank].session.connected(index))

    def calm(self):
        """Bring every connection back, deliver and notice everything."""
        while self.waiting() or self.later or self.cut_off:
            self.deliver_all()
            for pair in sorted(self.cut_off):
                self.mend(*pair)

    def waiting(self):
        """Queues that hold a message, in a fixed order."""
        return [queue for side in (self.up, self.down) for queue in side.values() if queue]

    def deliver(self, queue):
        """Deliver the first message of a queue."""
        header, payload = queue.popleft()
        for pair, candidate in self.up.items():
            if candidate is queue:
                rank, index = pair
                self.pass_on(index, self.receive(rank, index, header, payload))
                self.end_if_left(rank, index)
                return
        rank, index = next(pair for pair, candidate in self.down.items() if candidate is queue)
        self.do(rank, self.workers[rank].session.receive(index, header, payload, self.now))

    def drain(self, *queues):
        """Deliver all messages of some queues, of one after the other."""
        for queue in queues:
            while queue:
                self.deliver(queue)

    def deliver_all(self):
        while self.later or self.waiting():
            later, self.later = self.later, []
            for event in later:
                event()
            self.drain(*self.waiting())

    def tick(self, seconds):
        self.now += seconds
        for rank, worker in enumerate(self.workers):
            if worker.present:
                self.do(rank, worker.session.tick(self.now))
        for index, served in enumerate(self.served):
            self.pass_on(index, served.engine.tick(self.now))

    def do(self, rank, actions):
        worker = self.workers[rank]
        worker.joined = worker.joined or worker.session.joined
        for action in actions:
            if isinstance(action, Finish):
                number = worker.number(action.operation)
                assert number not in worker.ended, "ended twice"
                action.operation.ended = partial(worker.ended.__setitem__, number)
                action.operation.end(action.error)
            elif not isinstance(action, Reset):
                self.put(rank, action)
        for send in worker.session.flight.refill(self.now):
            self.put(rank, send)
        for action in actions:
            if isinstance(action, Reset):
                self.close(rank, action.link)

    def put(self, rank, send):
        assert (rank, send.link) not in self.cut_off, "said to nobody"
        # What is on the wire no longer changes with the buffer.
        payload = b"" if send.payload is None else bytes(send.payload)
        self.up[rank, send.link].append((send.header, payload))

    def pass_on(self, index, actions, served=None):
        for send in (served or self.served[index]).perform(actions):
            rank = int(send.peer.split(b"/")[0])
            if send.peer != self.peer(rank, index) or (rank, index) in self.cut_off:
                self.pass_on(index, self.engines[index].unreachable(send.peer))
                continue
            payload = b"" if send.payload is None else bytes(send.payload)
            self.down[rank, index].append((send.header, payload))

    def receive(self, rank, index, header, payload):
        return self.served[index].receive(self.peer(rank, index), header, payload)

    def peer(self, rank, index):
        """How a reducer's transport calls a connection."""
        return f"{rank}/{index}/{self.lives[rank, index]}".encode()


def connected(*given):
    """A network in which all ranks have joined."""
    network = Network(*given)
    network.connect()
    network.deliver_all()
    return network
